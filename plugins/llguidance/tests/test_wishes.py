"""Wishes that are none: what their errors say, and that they say where."""

from __future__ import annotations

import json

import pytest
from toolkit_lm import SamplingParams
from toolkit_lm.errors import RequestError

NOT = {
    "type": "object",
    "properties": {
        "a/b": {"type": "array", "items": [{"type": "string"}]},
        "c": {"anyOf": [{"not": {}}]},
    },
}
NESTED = json.loads('{"type": "or", "elements": [' * 40 + '{"type": "any_text"}' + "]}" * 40)
DEEP = json.loads('{"items":' * 70 + "{}" + "}" * 70)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"json": NOT},
            r"schema cannot be used: Unimplemented keys: \[\"not\"\] \(at #/properties/c/anyOf/0\)",
        ),
        (
            {
                "json": {
                    "$ref": "#/$defs/a",
                    "$defs": {"a": {"type": "array", "items": {"type": "objec"}}},
                }
            },
            "objec .at #/.defs/a/items",
        ),
        ({"json": {"type": "string", "pattern": "(("}}, "unclosed group"),
        ({"json": {"$ref": "http://example.invalid/a.json"}}, "does not fetch"),
        ({"json": {"$ref": "file:///etc/passwd"}}, "does not fetch"),
        (
            {"json": {"type": "integer", "minimum": 2, "maximum": 1}},
            r"no number is within the bounds 2 and 1 \(at #\)",
        ),
        ({"json": {"type": "string", "format": "zork"}}, "Unknown format: zork"),
        ({"json": {"x-guidance": {"lenient": True}, "not": {}}}, "Unimplemented keys"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": False}, r"false allows nothing \(at #\)"),
        ({"json": "false"}, r"false allows nothing \(at #\)"),
        ({"json": "{"}, "is not JSON"),
        ({"json": 5}, "is a mapping, not a int"),
        ({"json": DEEP}, "nested more than 64 deep at #/items/items"),
        ({"json": {"enum": ["x" * 300_000]}}, "at most 262144 are allowed"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": ""}, "not an empty one"),
        ({"regex": 5}, "must be a text"),
        ({"regex": "a" * 40_000}, "at most 32768"),
        ({"regex": r"a(?=b)"}, "look-around"),
        ({"choice": []}, "at least one"),
        ({"choice": "yes"}, "list of texts"),
        ({"choice": ["a", 1]}, "list of texts"),
        ({"choice": [str(i) for i in range(5001)]}, "5001 choices"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"grammar": "root ::= ("}, "grammar is not valid: .*line 1"),
        ({"grammar": 'start: a\na: b "x"\nb: a'}, "nothing matches it"),
        ({"structural_tag": {}}, "triggers"),
        (
            {"structural_tag": {"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}},
            "structure 0 begins with none",
        ),
        (
            {"structural_tag": {"type": "structural_tag", "format": {}}},
            "format must have a type: one of any_text",
        ),
        (
            {
                "structural_tag": {
                    "format": {"type": "sequence", "elements": [{"type": "tag", "begin": "a"}]}
                }
            },
            r"elements.0..end must be a text",
        ),
        (
            {"structural_tag": {"format": {"type": "or", "elements": []}}},
            "elements must be a list, and not an empty one",
        ),
        ({"structural_tag": {"format": NESTED}}, "nested more than 32 deep"),
        (
            {
                "structural_tag": {
                    "structures": [{"begin": "<a>", "schema": {"not": {}}}],
                    "triggers": ["<a"],
                }
            },
            "Unimplemented",
        ),
        ({}, "must have one of"),
        ({"regex": "a", "choice": ["a"]}, "there are regex and choice"),
        ({"regexp": "a"}, "no field 'regexp'. Did you mean 'regex'"),
        ({"json": {}, "whitespace_pattern": 3}, "must be a text"),
    ],
)
def test_what_is_wrong_is_told(llm, asked, message):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("a", SamplingParams(structured_outputs=asked), use_tqdm=False)
    assert error.value.param == "structured_outputs"
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("extra_args", "param", "message"),
    [
        (
            {"response_format": {"type": "xml"}},
            "response_format",
            "must be one of text, json_object",
        ),
        ({"response_format": {}}, "response_format", "must be one of"),
        ({"response_format": "json"}, "response_format", "must be a mapping"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "must be provided"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format",
            "JSON Schema",
        ),
        ({"guided_json": "{"}, "guided_json", "is not JSON"),
        ({"guided_json": 5}, "guided_json", "is a mapping"),
        (
            {"guided_regex": "a", "guided_choice": ["a"]},
            "guided_regex",
            "there are regex and choice",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "Cannot specify both",
        ),
    ],
)
def test_other_names_are_named(llm, extra_args, param, message):
    with pytest.raises(RequestError, match=message) as error:
        llm.generate("a", SamplingParams(extra_args=extra_args), use_tqdm=False)
    assert error.value.param == param


def test_not_strict_is_lenient(llm):
    told = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "schema": {"type": "array", "uniqueItems": True, "maxItems": 3, "items": {"enum": [1]}},
        },
    }
    with pytest.raises(RequestError, match="uniqueItems"):
        llm.generate("a", SamplingParams(extra_args={"response_format": told}), use_tqdm=False)
    told["json_schema"]["strict"] = False
    output = llm.generate(
        "a",
        SamplingParams(extra_args={"response_format": told}, max_tokens=50, seed=1),
        use_tqdm=False,
    )[0]
    assert set(json.loads(output.outputs[0].text)) <= {1}


def test_beams_are_refused():
    with pytest.raises(RequestError, match="structured_outputs has no effect with use_beam_search"):
        SamplingParams(
            structured_outputs={"regex": "a"}, use_beam_search=True, beam_width=2, temperature=0.0
        )
