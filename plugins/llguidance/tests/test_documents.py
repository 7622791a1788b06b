"""Outputs match the request: documents, matches and sentences that are drawn at random."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from schemas import SCHEMAS
from toolkit_lm import SamplingParams

DRAWS = 16


@pytest.mark.parametrize("name", SCHEMAS)
def test_documents_are_valid(generate, ending, name):
    validator = jsonschema.Draft202012Validator(
        SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    found = [
        one.text
        for temperature in (0.7, 3.0)
        for one in generate(
            {"json": SCHEMAS[name]}, n=DRAWS, temperature=temperature, logit_bias=ending
        )
        if one.finish_reason == "stop"
    ]
    assert len(found) >= DRAWS // 4, "too few come to their end"
    for text in found:
        validator.validate(json.loads(text))


def test_any_object(generate):
    for one in generate({"json_object": True}, n=DRAWS, max_tokens=200):
        if one.finish_reason == "stop":
            assert isinstance(json.loads(one.text), dict)
        assert one.text[0] == "{"


@pytest.mark.parametrize(
    "pattern", [r"[a-c]{3}", r"\d{3}-\d{4}", r"(yes|no|maybe)( indeed)?", r"é+!", r"[^a-z]{1,5}"]
)
def test_matches(generate, pattern):
    for one in generate({"regex": pattern}, n=DRAWS, temperature=3.0):
        if one.finish_reason == "stop":
            assert re.fullmatch(pattern, one.text), one.text
        else:
            assert one.finish_reason == "length" and pattern == r"é+!"


@pytest.mark.parametrize(
    "choices",
    [["yes", "no"], ["a", "ab", "abc"], ['"quoted"', "a\nb", "a/b\\", "日本", "", "yes"], ["only"]],
)
def test_choices(generate, choices):
    found = {one.text for one in generate({"choice": choices}, n=DRAWS, temperature=5.0)}
    assert found <= set(choices)
    assert len(found) > 1 or len(choices) == 1


@pytest.mark.parametrize(
    "grammar",
    [
        'start: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]{1,2}/\n',
        'root ::= number (" + " number)*\nnumber ::= [0-9] [0-9]?\n',
    ],
)
def test_grammars(generate, grammar):
    found = [
        one.text for one in generate({"grammar": grammar}, n=DRAWS) if one.finish_reason == "stop"
    ]
    assert found and all(re.fullmatch(r"\d{1,2}( \+ \d{1,2})*", text) for text in found)


def test_structural_tags(generate):
    asked = {
        "structures": [
            {"begin": "<f=add>", "schema": SCHEMAS["object"], "end": "</f>"},
            {"begin": "<f=no>", "schema": {}, "end": "."},
        ],
        "triggers": ["<f="],
    }
    tags = 0
    for one in generate(
        {"structural_tag": asked}, n=DRAWS, logit_bias={5: 0}, prompt="<f=add>" * 6, temperature=1.0
    ):
        for tag in one.text.split("<f=")[1:]:
            assert "add>".startswith(tag[:4]) or "no>".startswith(tag[:3])
            if tag.startswith("add>") and "</f>" in tag:
                jsonschema.validate(json.loads(tag[4:].split("</f>")[0]), SCHEMAS["object"])
                tags += 1
    text = generate(
        {"structural_tag": json.dumps({"type": "structural_tag", **asked})}, temperature=0.0
    )[0].text
    assert text == generate(None, temperature=0.0)[0].text or "<f=" in text


def test_white_space_has_bounds(generate):
    given = {
        "json": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 3,
            "maxItems": 3,
        }
    }
    assert all(
        re.fullmatch(r"\[\d,\d,\d\]", one.text)
        for one in generate({**given, "disable_any_whitespace": True}, n=DRAWS)
    )
    for one in generate({**given, "whitespace_pattern": " "}, n=DRAWS):
        assert re.fullmatch(r"\[ ?\d ?, ?\d ?, ?\d ?\]", one.text)
    assert not any(
        re.search(r"\s{22}|\n\s*\n", one.text) for one in generate(given, n=DRAWS, temperature=5.0)
    )


def test_objects_without_other_properties(generate):
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {"type": "null"}}}},
    }
    closed = {"json": schema, "disable_additional_properties": True}
    for one in generate(closed, n=DRAWS, temperature=3.0):
        if one.finish_reason == "stop":
            assert json.loads(one.text) in ({}, {"a": {}}, {"a": {"b": None}})


def test_older_and_other_names(llm):
    def texts(**extra_args):
        return (
            llm.generate(
                "It is",
                SamplingParams(max_tokens=40, seed=3, extra_args=extra_args),
                use_tqdm=False,
            )[0]
            .outputs[0]
            .text
        )

    assert texts(guided_choice=["x", "y"]) in "xy"
    assert re.fullmatch(r"[ab]{4}", texts(guided_regex="[ab]{4}"))
    assert texts(guided_grammar='root ::= "k"') == "k"
    assert json.loads(texts(guided_json=json.dumps(SCHEMAS["range"]))) < 1234
    assert json.loads(texts(guided_json=SCHEMAS["boolean"])) in (True, False)
    assert texts(guided_json_object=True)[0] == "{"
    told = {
        "type": "json_schema",
        "json_schema": {"name": "a", "strict": True, "schema": SCHEMAS["all"]},
    }
    assert 3 <= json.loads(texts(response_format=told)) <= 99
    assert texts(response_format={"type": "text"}) == texts()
    assert texts(structured_outputs={"json": None}) == texts()
