"""xgrammar through the whole engine: each kind, the limits, and what changes nothing."""

from __future__ import annotations

import re

import pytest
from toolkit_lm import SamplingParams
from toolkit_lm.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "large": {"type": "boolean"},
        "ways": {"type": "array", "items": {"enum": ["north", "south"]}, "maxItems": 2},
    },
    "required": ["city", "large", "ways"],
    "additionalProperties": False,
}
TAG = {"structures": [{"begin": "[", "schema": SCHEMA, "end": "]"}], "triggers": ["["]}


def test_structural_tags(generate, llm):
    """Free text until a trigger comes."""
    [trigger] = llm.engine.renderer.render_prompt("[", add_special_tokens=False).token_ids
    texts = [
        one.text
        for one in generate({"structural_tag": TAG}, n=4, logit_bias={trigger: 12.0}, max_tokens=60)
    ]
    assert any("[" in text for text in texts)
    assert all(re.match(r"\s*(\{|$)", text.partition("[")[2]) for text in texts), texts


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"json": {"not": {}}}, r"xgrammar does not hold to 'not' \(at #\)"),
        (
            {"json": {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 7}}}},
            r"'multipleOf' \(at #/properties/a\)",
        ),
        (
            {"json": {"type": "array", "items": {"oneOf": [{"type": "integer"}]}}},
            r"'oneOf' \(at #/items\)",
        ),
        ({"json": {"minLength": 3}}, "'minLength' of any type but one"),
        ({"json": {"$ref": "http://example.com/a"}}, "'\\$ref' 'http"),
        ({"json": {"type": "string", "pattern": "("}}, "parenthesis is not closed"),
        (
            {"json": {"type": "object", "required": ["a"]}},
            "'required' of properties that it does not name",
        ),
        ({"json": SCHEMA, "whitespace_pattern": " "}, "takes no whitespace_pattern"),
        ({"regex": "("}, "parenthesis is not closed"),
        ({"regex": "a" * 40_000}, "at most 32768"),
        ({"grammar": "root ::= x"}, 'Rule "x" is not defined'),
        ({"choice": []}, "at least one"),
        ({"structural_tag": {"format": {"type": "nonsense"}}}, "the structural tag cannot be used"),
        ({"structural_tag": {**TAG, "triggers": ["<b>"]}}, "begins with none of the triggers"),
    ],
    ids=repr,
)
def test_what_is_refused(generate, asked, reason):
    with pytest.raises(RequestError, match=reason):
        generate(asked)


def test_what_is_not_strict_passes(llm):
    asked = {
        "type": "json_schema",
        "json_schema": {
            "name": "a",
            "strict": False,
            "schema": {"type": "object", "minProperties": 0, "not": {}},
        },
    }
    [output] = llm.generate(
        "x", SamplingParams(max_tokens=40, extra_args={"response_format": asked}), use_tqdm=False
    )
    assert output.error is None and output.outputs[0].text.startswith("{")


def test_a_bomb_breaks_no_engine(generate):
    with pytest.raises(RequestError, match="too complex"):
        generate({"regex": "(" * 6 + "a" + "){1,99}" * 6})
    assert generate({"choice": ["yes"]})[0].text == "yes"


@pytest.mark.parametrize(
    "asked",
    [{"regex": "([a-z]{1,50}){1,500}"}, {"grammar": "root ::= (x{1,50}){1,500}\nx ::= [a-z]"}],
    ids=["regex", "grammar"],
)
def test_repetitions_of_repetitions_are_refused(generate, asked):
    """A token takes ever longer to read, up to minutes."""
    with pytest.raises(
        RequestError, match="too complex: it takes more than 1 s to compile and try"
    ):
        generate(asked)
