"""An argument that is written without quotes gets the type that the tool's schema says, however the
schema says it."""

from __future__ import annotations

import cProfile
import itertools
import json
import time

import jsonschema
import pytest
from test_parsers import PARSERS
from toolkit_lm.errors import RequestError
from toolkit_lm_parsers.schemas import Schemas

NULL = {"type": "null"}
KINDS = {
    "text of digits": ({"type": "string", "pattern": "^[0-9]{5}$"}, "12345", "12345"),
    "text of a constant": ({"type": "string", "enum": ["1", "true", "null"]}, "true", "true"),
    "listed text": ({"enum": ["1", "2"]}, "2", "2"),
    "constant text": ({"const": "5"}, "5", "5"),
    "integer": ({"type": "integer"}, "12", 12),
    "number": ({"type": "number"}, "1.50", 1.5),
    "boolean": ({"type": "boolean"}, "True", True),
    "listed number": ({"enum": [1, 2]}, "2", 2),
    "list": ({"type": "array", "items": {"type": "string"}}, '["1", "2"]', ["1", "2"]),
    "object": (
        {"type": "object", "properties": {"x": {"type": "string"}}},
        '{"x": "1"}',
        {"x": "1"},
    ),
    "object by its properties": (
        {"properties": {"x": {"type": "string"}}},
        '{"x": "1"}',
        {"x": "1"},
    ),
    "text or object": ({"type": ["string", "object"]}, "7", "7"),
}
"""A schema, a text, and what it means."""
WAYS = {
    "itself": lambda kind: (kind, {}),
    "$defs": lambda kind: ({"$ref": "#/$defs/K"}, {"$defs": {"K": kind}}),
    "definitions": lambda kind: ({"$ref": "#/definitions/K"}, {"definitions": {"K": kind}}),
    "a chain": lambda kind: (
        {"$ref": "#/$defs/A"},
        {"$defs": {"A": {"$ref": "#/$defs/B"}, "B": {"allOf": [{"$ref": "#/$defs/K"}]}, "K": kind}},
    ),
    "a name with a slash": lambda kind: ({"$ref": "#/$defs/a~1b%20c"}, {"$defs": {"a/b c": kind}}),
    "an anchor": lambda kind: ({"$ref": "#k"}, {"$defs": {"K": {**kind, "$anchor": "k"}}}),
    "a place in a list": lambda kind: (
        {"$ref": "#/$defs/K/anyOf/1"},
        {"$defs": {"K": {"anyOf": [NULL, kind]}}},
    ),
    "another property": lambda kind: ({"$ref": "#/properties/b"}, {"b": kind}),
    "anyOf": lambda kind: ({"anyOf": [kind, NULL]}, {}),
    "oneOf": lambda kind: ({"oneOf": [NULL, kind]}, {}),
    "anyOf of references": lambda kind: (
        {"anyOf": [{"$ref": "#/$defs/K"}, NULL], "default": None},
        {"$defs": {"K": kind}},
    ),
    "allOf": lambda kind: ({"allOf": [{"description": "what"}, kind]}, {}),
    "a description beside": lambda kind: (
        {"$ref": "#/$defs/K", "description": "what"},
        {"$defs": {"K": kind}},
    ),
    "nullable": lambda kind: ({**kind, "nullable": True}, {}),
    "a circle": lambda kind: (
        {"$ref": "#/$defs/K"},
        {"$defs": {"K": {"anyOf": [kind, {"$ref": "#/$defs/K"}]}}},
    ),
}
"""How a schema says so: of a property, and what is beside it."""
ROOTS = {
    "plain": lambda schema: schema,
    "referred to": lambda schema: {
        "$ref": "#/$defs/Arguments",
        "definitions": schema.pop("definitions", {}),
        "$defs": {**schema.pop("$defs", {}), "Arguments": schema},
    },
    "combined": lambda schema: {"allOf": [{"properties": schema.pop("properties")}], **schema},
}


def parameters(way, kind, root):
    schema, beside = WAYS[way](KINDS[kind][0])
    properties = {"a": schema, **({"b": beside.pop("b")} if "b" in beside else {})}
    return ROOTS[root]({"type": "object", "properties": properties, **beside})


def read(name, text, schema):
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    parser = PARSERS.make(name, "").parser("", tools)
    [call] = [
        call for delta in (parser.push(text), parser.finish(cut=False)) for call in delta.tool_calls
    ]
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("kind", "way", "root"),
    # A reference to another property leads to those of a plain root.
    [
        case
        for case in itertools.product(KINDS, WAYS, ROOTS)
        if case[1] != "another property" or case[2] == "plain"
    ],
)
def test_an_argument_is_of_its_type(kind, way, root):
    schema = parameters(way, kind, root)
    (_, text, value) = KINDS[kind]
    found = read(
        "qwen3_coder",
        f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        schema,
    )
    assert found == {"a": value}
    jsonschema.Draft202012Validator(schema).validate(found)
    if not isinstance(value, list | dict):
        assert read("gemma", f"<|tool_call>call:f{{a:{text}}}<tool_call|>", schema) == {"a": value}
        assert read(
            "gemma", f"<start_function_call>call:f{{a:{text}}}<end_function_call>", schema
        ) == {"a": value}


def test_values_within_a_value_have_their_types_too():
    schema = {
        "type": "object",
        "properties": {
            "where": {"$ref": "#/$defs/Where"},
            "zips": {"type": "array", "items": {"$ref": "#/$defs/Zip"}},
        },
        "$defs": {
            "Zip": {"type": "string"},
            "Where": {"type": "object", "properties": {"zip": {"$ref": "#/$defs/Zip"}}},
        },
    }
    assert read("gemma", "<|tool_call>call:f{where:{zip:123},zips:[4,5]}<tool_call|>", schema) == {
        "where": {"zip": "123"},
        "zips": ["4", "5"],
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "https://example.com/schema"},
        {"$ref": "#/$defs/none"},
        {"$ref": "#"},
        {"$ref": 7},
        {"allOf": [{"$ref": "#/properties/a"}]},
        {"anyOf": [{"$ref": "#/properties/a"}]},
        {"anyOf": 5, "allOf": "x", "enum": 3, "type": {}},
    ],
)
def test_what_leads_nowhere_or_round_in_circles_is_a_text(schema):
    whole = {"type": "object", "properties": {"a": schema}}
    text = "<tool_call><function=f><parameter=a>12</parameter></function></tool_call>"
    assert read("qwen3_coder", text, whole) in ({"a": "12"}, {"a": 12})
    assert PARSERS.make("qwen3_coder", "").structure(
        [{"function": {"name": "f", "parameters": whole}}], parallel=False
    )


def test_a_schema_of_many_references_takes_no_time():
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(200)}
    chain = {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(5000)}
    schemas = Schemas({"$defs": {**doubled, **chain}})
    begun = time.process_time()
    for name in ("d0", "c0"):
        schemas.argument("1", {"$ref": f"#/$defs/{name}"})
        schemas.merged({"$ref": f"#/$defs/{name}"})
        schemas.alone({"$ref": f"#/$defs/{name}"})
    assert time.process_time() - begun < 2


def test_a_part_stands_alone():
    root = {
        "$defs": {
            "n": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            "z": {"enum": [{"$ref": "#/x"}]},
        },
        "properties": {"$ref": {"type": "null"}},
    }
    alone = Schemas(root).alone({"anyOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/z"}]})
    validator = jsonschema.Draft202012Validator(alone)
    assert [validator.is_valid(value) for value in ([[], [[]]], {"$ref": "#/x"}, [1], "x")] == [
        True,
        True,
        False,
        False,
    ]
    assert Schemas(root).alone({"type": "null"}) == {"type": "null"}


def many(one, count=300, **beside):
    """A schema of which many properties refer to the same."""
    return {"type": "object", "properties": {f"p{i}": one for i in range(count)}, **beside}


def obj(name, count=5):
    return {
        "type": "object",
        "properties": {f"p{i}": {"$ref": f"#/$defs/{name}"} for i in range(count)},
    }


NAMES = [f"n{i}" for i in range(1000)]
TO_X = {"$ref": "#/$defs/x"}
WIDE = {
    "references to small ones": many(
        TO_X, **{"$defs": {"x": {"type": "array", "items": {"type": "string"}}}}
    ),
    "references to the root": many({"type": "array", "items": {"$ref": "#"}}),
    "references to a large one": many(
        TO_X,
        **{"$defs": {"x": {"type": "array", "items": {"properties": dict.fromkeys(NAMES, True)}}}},
    ),
    "references to each other": {
        "type": "object",
        "properties": {
            f"p{i}": {"type": "array", "items": {"$ref": f"#/properties/p{(i + 1) % 300}"}}
            for i in range(300)
        },
    },
    "anchors": many(
        {"$ref": "#end"},
        **{"$defs": {name: {"type": "integer", "$anchor": name} for name in [*NAMES, "end"]}},
    ),
    "listed texts": many(TO_X, **{"$defs": {"x": {"enum": NAMES}}}),
    "listed numbers": many(TO_X, **{"$defs": {"x": {"type": "integer", "enum": [*range(1000)]}}}),
    "long texts": many(TO_X, **{"$defs": {"x": {"enum": ["x" * 50_000]}}}),
    "long descriptions": many(
        TO_X, **{"$defs": {"x": {"type": "integer", "description": "x" * 50_000}}}
    ),
    "alternatives": many(
        TO_X, **{"$defs": {"x": {"anyOf": [{"type": "string"} for _ in range(1000)]}}}
    ),
    "required properties": {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in NAMES},
        "required": NAMES,
    },
    "required in objects": many(
        TO_X,
        **{
            "$defs": {
                "x": {"type": "object", "required": NAMES, "properties": dict.fromkeys(NAMES, True)}
            }
        },
    ),
    "objects in objects": {
        **obj("a"),
        "$defs": {
            "a": obj("b"),
            "b": obj("c"),
            "c": obj("d"),
            "d": obj("e"),
            "e": {"type": "string"},
        },
    },
    "a circle of alternatives": many({"anyOf": [{"$ref": "#/properties/p0"}] * 3}, 1),
}
"""Short schemas, of which what is made could be long."""
SHAPES = [
    name
    for name in PARSERS
    if PARSERS.make(name, "").structure([{"function": {"name": "f"}}], parallel=False) is not None
]


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in range(1, 5))]
)
def test_what_is_made_of_wide_schemas_is_bounded(part):
    """Each format and each schema, for several functions: its size and its work are, or it is
    refused. A fifth of the pairs runs by day, and all of a format that was not bounded."""
    assert {"qwen3_coder", "gemma", "hermes", "mistral"} <= {*SHAPES}
    pairs = [
        (name, wide)
        for index, name in enumerate(SHAPES)
        for number, wide in enumerate(WIDE)
        if (index + number) % 5 == part or (name == "minimax_m3" and part == 0)
    ]
    assert {*SHAPES} == {name for name, _ in pairs} and {*WIDE} == {wide for _, wide in pairs}
    for name, wide in pairs:
        tools = [{"function": {"name": f"f{i}", "parameters": WIDE[wide]}} for i in range(4)]
        given = len(json.dumps(tools))
        made: list[object] = []

        def make(name=name, tools=tools, made=made):
            try:
                made.append(PARSERS.make(name, "").structure(tools, parallel=True))
            except RequestError as error:
                assert error.param == "tools" and "fewer tools" in str(error)
                made.append(None)

        assert calls(make) < 8_000_000 + 40 * given, (name, wide)
        assert len(json.dumps(made[0])) < 3_000_000 + 6 * given, (name, wide)


def calls(call) -> int:
    """The functions, those in C too, that a call calls."""
    profile = cProfile.Profile()
    profile.runcall(call)
    return sum(entry.callcount for entry in profile.getstats())


def test_what_refers_to_too_much_is_refused_and_what_is_shared_is_one():
    small = WIDE["references to small ones"]
    large = WIDE["long descriptions"]
    with pytest.raises(RequestError, match="fewer tools"):
        PARSERS.make("qwen3_coder", "").structure(
            [{"function": {"name": "f", "parameters": large}}], parallel=False
        )
    schemas = Schemas(small)
    one, other = (schemas.alone({"type": "array", "items": TO_X, "title": title}) for title in "ab")
    [first] = one["$defs"].values()
    [second] = other["$defs"].values()
    assert first is second


def test_a_part_has_the_definitions_that_it_reaches_and_no_others():
    root = {
        "$defs": {"a": {"items": {"$ref": "#/properties/p"}}, "b": {"type": "null"}},
        "properties": {"p": {"$ref": "#k"}, "q": {}},
    }
    root["$defs"]["k"] = {"$anchor": "k", "type": "integer"}
    alone = Schemas(root).alone({"type": "array", "items": {"$ref": "#/$defs/a"}})
    assert len(alone["$defs"]) == 3
    validator = jsonschema.Draft202012Validator(alone)
    assert [validator.is_valid(value) for value in ([[1]], [["x"]], ["x"])] == [True, False, True]
