"""Calls that must come in Gemma's form follow their schema, whatever a model would rather write."""

from __future__ import annotations

import json

import jsonschema
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm.plugin import Plugins
from toolkit_lm_parsers.gemma_structure import GemmaArguments

MARKS = {
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"$ref": "#/$defs/tags"},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}
SCHEMAS = {
    "none": None,
    "empty": {"type": "object", "properties": {}},
    "required": {
        **PERSON,
        "$defs": {"tags": {"type": "array", "items": {"enum": ["a", "b", 1, None]}}},
    },
    "optional": {
        "type": "object",
        "properties": {
            name: {"type": kind}
            for name, kind in (("a", "boolean"), ("b", "null"), ("c", "number"))
        },
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "people": {
                "type": "array",
                "minItems": 1,
                "items": {
                    **PERSON,
                    "properties": {"age": {"type": "integer"}, "name": {"const": "x"}},
                },
            },
            "size": {"anyOf": [{"type": "integer"}, {"enum": ["big", "small"]}]},
            "odd key: 1": {"type": ["boolean", "null"]},
            "code": {"type": "string", "pattern": "^[a-z]{2}-[0-9]{1,3}$"},
        },
        "required": ["people", "size", "odd key: 1", "code"],
        "additionalProperties": False,
    },
    "short texts": {
        "type": "object",
        "properties": {
            "a": {"type": "string", "minLength": 2, "maxLength": 3},
            "b": {"type": "string", "maxLength": 0},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "combined": {
        "$ref": "#/$defs/Arguments",
        "$defs": {
            "Arguments": {
                "type": "object",
                "properties": {
                    "small": {"allOf": [{"$ref": "#/$defs/Whole"}, {"minimum": 1}, {"maximum": 3}]},
                    "same": {"$ref": "#/$defs/Arguments/properties/small"},
                },
                "required": ["small", "same"],
                "additionalProperties": False,
            },
            "Whole": {"type": "integer"},
        },
    },
    "recursive": {
        "type": "object",
        "properties": {"left": {"$ref": "#"}, "value": {"type": "integer"}},
        "required": ["value"],
        "additionalProperties": False,
    },
}
FREE = {
    "type": "object",
    "properties": {"any": {}, "object": {"type": "object"}},
    "required": ["any", "object"],
}


def tool(name, schema):
    function = {"name": name} if schema is None else {"name": name, "parameters": schema}
    return {"type": "function", "function": function}


@pytest.fixture(scope="module", params=MARKS)
def model(request, checkpoint_with):
    """An engine, and the format of its template."""
    opening, closing, quote = marks = MARKS[request.param]
    template = (
        f"{{# {opening} {closing} {quote} #}}{{% for m in messages %}}{{{{ m['content'] }}}}{{% "
        f"endfor %}}"
    )
    folder = checkpoint_with(template, marks, special=True, longest=1024)
    with LLM(str(folder), load_format="dummy", dtype="float32", max_num_seqs=16) as llm:
        yield llm, Plugins.load().parsers.make("gemma", template), marks


def drawn(model, tools, *, parallel=False, n=6, more=()):
    """The calls of several answers, each as its name and arguments."""
    llm, form, (_, closing, quote) = model
    structure = form.structure(tools, parallel=parallel)
    asked = {"structural_tag": {"type": "structural_tag", "format": structure}}
    renderer = llm.engine.renderer
    # Marks with which a random model ends its texts, lists and answers.
    ends = [
        renderer.render_prompt(text, add_special_tokens=False).token_ids[-1]
        for text in (quote, "]", "}", closing)
    ]
    bias = dict.fromkeys([*ends, *renderer.eos_token_ids, *more], 4.0)
    params = SamplingParams(
        n=n,
        max_tokens=900,
        seed=1,
        structured_outputs=asked,
        logit_bias=bias,
        skip_special_tokens=False,
    )
    [output] = llm.chat([{"role": "user", "content": "x"}], params, use_tqdm=False)
    assert output.error is None
    found = []
    for one in output.outputs:
        assert one.finish_reason == "stop", one.text
        parser = form.parser("", tools)
        deltas = [parser.push(one.text), parser.finish(cut=False)]
        assert parser.calls_tools and not "".join(delta.content for delta in deltas), one.text
        found.append(
            [
                (call.name, json.loads(call.arguments))
                for delta in deltas
                for call in delta.tool_calls
            ]
        )
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_arguments_follow_the_schema(model, name):
    for [(called, arguments)] in drawn(model, [tool("get-it", SCHEMAS[name])]):
        assert called == "get-it"
        jsonschema.validate(arguments, SCHEMAS[name] or {"maxProperties": 0})


def test_what_is_nullable_may_be_null(model):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean", "nullable": True}},
        "required": ["a"],
        "additionalProperties": False,
    }
    found = [arguments["a"] for [(_, arguments)] in drawn(model, [tool("f", schema)], n=16)]
    assert {None} < set(found) <= {None, True, False}


def test_what_a_schema_leaves_open_is_any_value(model):
    for [(_, arguments)] in drawn(model, [tool("f", FREE)]):
        jsonschema.validate(arguments, FREE)


def test_one_of_several_is_called_and_several_where_they_may_be(model):
    tools = [tool("f", SCHEMAS["empty"]), tool("g", SCHEMAS["empty"])]
    assert {len(calls) for calls in drawn(model, tools, n=12)} == {1}
    again = model[0].engine.renderer.render_prompt(model[2][0], add_special_tokens=False).token_ids
    found = drawn(model, tools, parallel=True, n=12, more=again)
    assert {name for calls in found for name, _ in calls} == {"f", "g"} and max(map(len, found)) > 1


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 3},
        {"properties": {"a": 5, "b": {"enum": []}, "c": {"type": "odd"}, "d": {"$ref": "#/no"}}},
    ],
)
def test_a_schema_that_is_none_is_no_error(model, schema):
    assert drawn(model, [tool("f", {"type": "object", **schema})], n=1)


def test_open_values_hold_fewer_levels_where_there_are_many():
    def levels(found):
        inner = [
            one
            for one in (found.get("elements") or found.get("tags") or [found.get("content")])
            if isinstance(one, dict)
        ]
        return (found["type"] == "tags_with_separator") + max(map(levels, inner), default=0)

    def opened(count, functions=1):
        schema = {
            "type": "object",
            "properties": {f"p{number}": {} for number in range(count)},
            "required": [f"p{n}" for n in range(count)],
        }
        return levels(GemmaArguments("<escape>", schema, functions).structure())

    assert [opened(1), opened(10), opened(60), opened(1, 60)] == [4, 3, 2, 2]


def test_many_functions_with_open_values_are_a_grammar(model):
    assert drawn(
        model,
        [tool(f"f{number}", {"type": "object", "properties": {"any": {}}}) for number in range(30)],
        n=1,
    )


def test_a_large_schema_is_a_grammar_or_an_error(model):
    wide = {
        "type": "object",
        "properties": {f"p{number}": {"type": "integer"} for number in range(60)},
    }
    assert drawn(model, [tool("f", wide)], n=1)
    deep = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for _ in range(40):
        deep = {"type": "object", "properties": {"a": deep, "b": deep}}
    try:
        drawn(model, [tool("f", deep)], n=1)
    except RequestError as error:
        assert "formats" in str(error) or "characters" in str(error)
