"""Schemas that are accepted have a document that can be finished, with any compiler: a dead end is
refused with its place."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import toolkit_lm_tiny
from toolkit_lm.errors import RequestError
from toolkit_lm_llguidance.backend import LLGuidanceCompiler
from toolkit_lm_llguidance.grammars import grammar_of_schema, options_of
from toolkit_lm_structured_output.checks import schema_of
from toolkit_lm_structured_output.contract import Source
from toolkit_lm_structured_output.wishes import Wish
from toolkit_lm_xgrammar.compiler import XGrammarCompiler
from toolkit_lm_xgrammar.reader import XGrammarReader

EOS = 3
SOURCE = Source(
    str(Path(toolkit_lm_tiny.__file__).parent / "checkpoint" / "tokenizer.json"), (EOS,), 1536
)


def inside(schema):
    """The schema of an object that must have such a part."""
    return {
        "type": "object",
        "properties": {"a": schema},
        "required": ["a"],
        "additionalProperties": False,
    }


REST = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/rest"}},
    "required": ["next"],
    "additionalProperties": False,
}
DEAD_ENDS = {
    "minimum": {"type": "integer", "minimum": 5, "maximum": 3},
    "maximum": {"type": "number", "minimum": 0.5, "maximum": 0.25},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 3, "maximum": 3},
    "exclusiveMaximum": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 4},
    "multipleOf": {"type": "integer", "minimum": 8, "maximum": 13, "multipleOf": 7},
    "minLength": {"type": "string", "minLength": 5, "maxLength": 2},
    "maxLength": {"type": "string", "maxLength": -1, "minLength": 0},
    "pattern": {"type": "string", "pattern": "^abc$", "maxLength": 2},
    "format": {"type": "string", "format": "date", "maxLength": 3},
    "minItems": {"type": "array", "minItems": 3, "maxItems": 2},
    "maxItems": {
        "type": "array",
        "prefixItems": [{"type": "null"}] * 2,
        "minItems": 2,
        "maxItems": 1,
    },
    "items": {
        "type": "array",
        "items": {"type": "integer", "minimum": 2, "maximum": 1},
        "minItems": 1,
    },
    "prefixItems": {"type": "array", "prefixItems": [{"type": "null"}, False], "minItems": 2},
    "minProperties": {
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "maxProperties": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["a", "b"],
        "maxProperties": 1,
    },
    "required": {
        "type": "object",
        "properties": {},
        "required": ["a"],
        "additionalProperties": False,
    },
    "properties": inside({"type": "string", "enum": [1]}),
    "patternProperties": {
        **inside({"type": "integer"}),
        "patternProperties": {"^a": {"type": "string"}},
    },
    "additionalProperties": {"type": "object", "required": ["a"], "additionalProperties": False},
    "enum": {"type": "integer", "enum": ["a", None]},
    "const": {"type": "string", "const": 1},
    "type": {"type": []},
    "allOf": {"allOf": [{"type": "string"}, {"type": "integer"}]},
    "anyOf": {
        "anyOf": [{"type": "string", "enum": [1]}, {"type": "integer", "minimum": 1, "maximum": 0}]
    },
    "oneOf": {"oneOf": [{"type": "string", "enum": [1]}]},
    "$ref": {"$ref": "#/$defs/rest", "$defs": {"rest": REST}},
    "not": {"not": {}},
}
"""A dead end by each keyword."""
HARMLESS = {"$schema", "$id", "description", "title", "default", "examples"}
REFUSED = {
    *(
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "if",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
    ),
    *("uniqueItems", "$dynamicRef"),
}
"""Keywords that no backend takes, so that they lead nowhere."""


def read_llguidance(schema):
    wish = Wish("json", "json", schema)
    checked = schema_of(wish)
    options = options_of(wish)
    return grammar_of_schema(checked, options), {"schema": checked, "options": options}


def read_xgrammar(schema):
    return XGrammarReader(SOURCE, None).read(Wish("json", "json", schema)).grammar, None


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def backend(request):
    """Why a schema is refused, "" where it is not; and documents of one that is not."""
    compiler, read = {
        "llguidance": (LLGuidanceCompiler, read_llguidance),
        "xgrammar": (XGrammarCompiler, read_xgrammar),
    }[request.param]
    made = compiler(SOURCE)

    def refused(schema):
        try:
            return made.error_of(*read(schema))
        except RequestError as error:
            return str(error)

    def walks(schema):
        for seed in range(4):
            matcher = made.compile(read(schema)[0])
            mask = np.zeros(-(-made.size // 32), np.int32)
            generator = random.Random(seed)
            for _ in range(200):
                matcher.fill(mask)
                allowed = np.flatnonzero(
                    np.unpackbits(mask.view(np.uint8), count=made.size, bitorder="little")
                ).tolist()
                if EOS in allowed or not allowed:
                    break
                matcher.consume(generator.choice(allowed))
            yield bool(allowed)

    return request.param, refused, walks


def test_each_keyword_has_a_dead_end():
    keywords = set(jsonschema.Draft202012Validator.VALIDATORS)
    assert keywords <= set(DEAD_ENDS) | REFUSED


@pytest.mark.parametrize("keyword", sorted(REFUSED - {"$dynamicRef"}))
def test_keywords_that_no_backend_takes_are_refused(backend, keyword):
    value = {
        "dependentRequired": {"a": ["b"]},
        "dependentSchemas": {"a": {"maxProperties": 1}},
        "uniqueItems": True,
    }.get(keyword, {"type": "null"})
    value = False if keyword.startswith("unevaluated") else value
    kind = "array" if "tems" in keyword or keyword == "contains" else "object"
    assert backend[1]({"type": kind, keyword: value}), keyword


@pytest.mark.parametrize("keyword", DEAD_ENDS)
def test_a_dead_end_is_refused_with_its_place(backend, keyword):
    name, refused, _ = backend
    for schema in (
        DEAD_ENDS[keyword],
        inside({k: v for k, v in DEAD_ENDS[keyword].items() if k != "$defs"}),
    ):
        schema = {**schema, "$defs": {"rest": REST}} if "$ref" in json.dumps(schema) else schema
        reason = refused(schema)
        assert reason, (keyword, schema)
        assert "(at #" in reason or name == "xgrammar", reason


GOOD = {
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": False},
        "additionalProperties": False,
    },
    "nullable": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"anyOf": [inside({"$ref": "#/$defs/n"}), {"type": "null"}]}},
    },
    "bounds": {"type": "integer", "minimum": 3, "maximum": 3},
    "one of": {"anyOf": [{"type": "string", "enum": [1]}, {"type": "null"}]},
}


@pytest.mark.parametrize("name", GOOD)
def test_what_can_be_finished_is_not(backend, name):
    kind, refused, walks = backend
    reason = refused(GOOD[name])
    if reason:
        assert kind == "xgrammar" and "xgrammar does not hold to" in reason, reason
        return
    assert all(walks(GOOD[name]))
