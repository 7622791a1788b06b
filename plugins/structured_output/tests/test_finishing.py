"""A schema is called a dead end where it is one, and only there."""

from __future__ import annotations

import itertools
import math
import sys
import time

import jsonschema
import pytest
from hypothesis import given, settings, strategies as st
from toolkit_lm_structured_output.finishing import dead_end

DOCUMENTS = [
    *(None, True, False, 0, 1, 2, 3, 5, 7, -1, 0.5, 2.5, 100, "", "a", "ab", "abcdef", "1"),
    *(
        [],
        [1],
        [1, 2],
        ["a", "b"],
        [None] * 4,
        [[]],
        {},
        {"a": 1},
        {"a": "x"},
        {"b": None},
        {"a": 1, "b": 2},
        {"a": {}},
        {"a": {"a": {}}},
    ),
    *({"a": None, "b": None, "c": None}, {"a": [1]}, {"a": "ab", "b": 3}),
]
SMALL = st.integers(-1, 4)
LEAVES = st.one_of(
    st.booleans(),
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.one_of(
                st.sampled_from(
                    ["null", "boolean", "integer", "number", "string", "array", "object"]
                ),
                st.lists(
                    st.sampled_from(["null", "integer", "string", "object"]), min_size=1, max_size=2
                ),
            ),
            **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), SMALL),
            **{
                name: st.integers(0, 3)
                for name in (
                    "minLength",
                    "maxLength",
                    "minItems",
                    "maxItems",
                    "minProperties",
                    "maxProperties",
                )
            },
            "multipleOf": st.sampled_from([1, 2, 3, 0.5]),
            "enum": st.lists(
                st.sampled_from([1, "a", None, True, 2.5, []]), min_size=1, max_size=2
            ),
            "required": st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True),
        },
    ),
)


def larger(inner):
    return st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(["array", "object"]),
            "properties": st.dictionaries(st.sampled_from(["a", "b"]), inner, max_size=2),
            "additionalProperties": inner,
            "required": st.lists(st.sampled_from(["a", "b"]), max_size=2, unique=True),
            "items": inner,
            "prefixItems": st.lists(inner, min_size=1, max_size=2),
            "minItems": st.integers(0, 3),
            "allOf": st.lists(inner, min_size=1, max_size=2),
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "$ref": st.sampled_from(["#", "#/$defs/x"]),
        },
    )


@settings(max_examples=200, deadline=None)
@given(schema=st.recursive(LEAVES, larger, max_leaves=8), x=LEAVES)
def test_a_dead_end_has_no_document(schema, x):
    if isinstance(schema, dict):
        schema = {**schema, "$defs": {"x": x}}
    found = dead_end(schema)
    if found is None:
        return
    for document in DOCUMENTS:
        try:
            is_valid = jsonschema.Draft202012Validator(schema).is_valid(document)
        except RecursionError:
            is_valid = False
        assert not is_valid, (found, document)


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        (
            {
                "$ref": "#/$defs/n",
                "$defs": {
                    "n": {
                        "type": "object",
                        "properties": {"n": {"$ref": "#/$defs/n"}},
                        "required": ["n"],
                    }
                },
            },
            "#/$defs/n",
        ),
        ({"type": "array", "minItems": 1, "items": {"$ref": "#"}}, "#"),
        (
            {
                "anyOf": [
                    {"type": "array", "minItems": 1, "items": {"$ref": "#"}},
                    {"type": "integer", "minimum": 2, "maximum": 1},
                ]
            },
            "#/anyOf/1",
        ),
        (
            {
                "type": "object",
                "properties": {"a/b": {"minLength": 2, "maxLength": 1, "type": "string"}},
                "required": ["a/b"],
            },
            "#/properties/a~1b",
        ),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 2}]}, "#"),
        ({"const": 1, "enum": [2]}, "#"),
        ({"type": "number", "exclusiveMinimum": True, "minimum": 2, "maximum": 2}, "#"),
        ({"type": "integer", "minimum": 0.2, "maximum": 0.8}, "#"),
    ],
)
def test_it_is_named(schema, where):
    found = dead_end(schema)
    assert found is not None and found.where.startswith(where)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}},
                    "required": ["n"],
                }
            },
        },
        {"type": "array", "items": {"$ref": "#"}},
        {"type": "object", "properties": {"n": {"$ref": "#"}}},
        {"type": "object", "properties": {"a": False}},
        {"type": "string", "nullable": True, "enum": ["a", None]},
        {"type": ["string", "null"], "minLength": 3, "maxLength": 1},
        {"$ref": "#/nowhere"},
        {"type": "odd", "required": 3, "enum": 4, "properties": 5, "minimum": "x"},
        {"type": "number", "minimum": -math.inf, "maximum": math.nan},
    ],
)
def test_what_can_be_finished_is_none(schema):
    assert dead_end(schema) is None


def test_it_takes_no_time_for_large_schemas():
    chain = {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]}
            for i in range(3000)
        },
    }
    wide = {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(30)]} for i in range(100)
        ]
    }
    doubled = {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{i}": {
                "properties": {name: {"$ref": f"#/$defs/d{i + 1}"} for name in "ab"},
                "required": ["a", "b"],
            }
            for i in range(40)
        },
    }
    begun = time.process_time()
    for schema, _ in itertools.product((chain, wide, doubled), range(2)):
        dead_end(schema)
    assert time.process_time() - begun < 10


BIG = 10**400
NAMED = [f"n{i}" for i in range(2000)]
WIDE = {
    "equal values": {"enum": [1] * 5000, "allOf": [{}] * 1500},
    "values that none admits": {
        "enum": [*range(5000)],
        "type": "string",
        "allOf": [{"minimum": i} for i in range(1500)],
    },
    "lists that share nothing": {"allOf": [{"enum": [*range(place, 9000, 2)]} for place in (0, 1)]},
    "many lists": {"allOf": [{"enum": [*range(100)]} for _ in range(500)]},
    "values of values": {"allOf": [{"enum": [[i] * 50 for i in range(900)]} for _ in range(40)]},
    "required properties": {
        "type": "object",
        "required": NAMED,
        "allOf": [{} for _ in range(2000)],
    },
    "items": {
        "type": "array",
        "minItems": 3000,
        "prefixItems": [True] * 3000,
        "allOf": [{} for _ in range(2000)],
    },
    "types": {"allOf": [{"type": ["string"] * 3000} for _ in range(60)]},
    "constants for schemas": {"allOf": [True] * 50_000},
}
"""Short schemas, of which each part is to be held against each entry of a list."""
DISTANT = {
    "type": "object",
    "required": NAMED,
    "properties": {name: {"allOf": [{"$ref": "#/$defs/x"}, {}]} for name in NAMED},
}


def steps(call) -> int:
    """The lines of the module that a call runs, and the loops within them."""
    count = 0

    def traced(frame, event, _):
        nonlocal count
        count += event in ("line", "opcode")
        return traced if "finishing" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("name", [*WIDE, *(f"{name}, from many places" for name in WIDE)])
def test_work_is_bounded_however_wide_a_schema_is(name):
    wide, _, distant = name.partition(", ")
    schema = {**DISTANT, "$defs": {"x": WIDE[wide]}} if distant else WIDE[wide]
    assert steps(lambda: dead_end(schema)) < 600_000


@pytest.mark.parametrize(
    ("schema", "is_dead"),
    [
        *(
            ({"type": "integer", name: BIG}, False)
            for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        ),
        *(
            ({name: BIG}, False)
            for name in ("minLength", "minItems", "maxItems", "minProperties", "maxLength")
        ),
        ({"type": "string", "minLength": BIG, "maxLength": 3}, True),
        ({"type": "integer", "minimum": BIG, "maximum": 1.5}, True),
        ({"const": BIG, "maximum": 2.5}, True),
        ({"enum": [BIG, "x"], "minLength": BIG, "minimum": 1.5}, False),
        ({"type": "array", "minItems": BIG, "items": False}, True),
        ({"type": "object", "minProperties": BIG, "additionalProperties": False}, True),
    ],
)
def test_a_number_may_be_larger_than_any_float(schema, is_dead):
    assert (dead_end(schema) is not None) == is_dead


@pytest.mark.parametrize(
    ("one", "other", "is_dead"),
    [
        (1, 1.0, False),
        (1, True, True),
        ([1], [True], True),
        ({"a": 1}, {"a": 1.0}, False),
        ([], {}, True),
        (None, False, True),
    ],
)
def test_lists_share_the_values_that_are_equal(one, other, is_dead):
    assert (
        dead_end({"allOf": [{"enum": ["x", one]}, {"enum": ["y", other]}]}) is not None
    ) == is_dead
