"""Grammars that are written to break the engine, beside those of the conformance kit: each is
refused or served in time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from toolkit_lm import AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.params import OF_THE_REQUEST

SECONDS = 30.0
"""Far more than each takes on a machine that does nothing else."""


def chain(count, made):
    return {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{i}": made(f"#/$defs/d{i + 1}") for i in range(count)}
        | {f"d{count}": {"type": "null"}},
    }


def nested(count, word):
    schema = {"type": "integer"}
    for _ in range(count):
        schema = {word: [schema, {"type": "string"}]}
    return schema


BOMBS = {
    "references": {"json": chain(3000, lambda ref: {"$ref": ref})},
    "referenced properties": {
        "json": chain(1500, lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"$ref": ref}}})
    },
    "doubled references": {
        "json": chain(40, lambda ref: {"allOf": [{"$ref": ref}, {"$ref": ref}]})
    },
    "doubled alternatives": {
        "json": chain(
            40, lambda ref: {"anyOf": [{"$ref": ref}, {"type": "array", "items": {"$ref": ref}}]}
        )
    },
    "products": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(3)]} for i in range(12)
            ]
        }
    },
    "alternatives": {"json": nested(30, "anyOf")},
    "multiple": {"json": {"type": "integer", "multipleOf": 999_983}},
    "small multiple": {"json": {"type": "number", "multipleOf": 1e-300}},
    "wide range": {"json": {"type": "number", "minimum": 1e-300, "maximum": 1e300}},
    "enums": {"json": {"allOf": [{"enum": list(range(500))}] * 50}},
    "patterns": {
        "json": {
            "allOf": [{"type": "string", "pattern": f".*{chr(97 + i)}.{{9}}"} for i in range(26)]
        }
    },
    "names": {"json": {"patternProperties": {f"^.*{i}.*$": {} for i in range(200)}}},
    "repeated": {"regex": "(a{1000}){1000}"},
    "unicode": {"regex": r"[\p{L}]{1,10000}\p{L}"},
    "doubled terminals": {
        "grammar": "\n".join(
            [f"X{i}: X{i + 1} X{i + 1}" for i in range(1000)] + ['X1000: "a"', "start: X0"]
        )
    },
    "doubled rules": {
        "grammar": "\n".join(
            [f"x{i}: x{i + 1} x{i + 1}" for i in range(60)] + ['x60: "a"', "start: x0"]
        )
    },
    "maybe": {"grammar": "start: " + '"a"? ' * 6000},
    "nested": {"grammar": "start: " + "(" * 15_000 + '"a"' + ")" * 15_000},
    "nested GBNF": {"grammar": "root ::= " + "(" * 15_000 + '"a"' + ")" * 15_000},
    "rules": {
        "grammar": "\n".join([f"x{i}: x{i + 1}" for i in range(2000)] + ['x2000: "a"', "start: x0"])
    },
    "left": {"grammar": 'start: s\ns: s s s | s s | "a" |'},
}


@pytest.mark.parametrize("name", BOMBS)
def test_it_is_answered_in_time(llm, name):
    begun = time.monotonic()
    try:
        output = llm.generate(
            "a",
            SamplingParams(structured_outputs=BOMBS[name], max_tokens=20, seed=1),
            use_tqdm=False,
        )[0]
        found = output.error or "served"
    except RequestError as error:
        assert error.param == "structured_outputs"
        found = str(error)
    assert time.monotonic() - begun < SECONDS
    assert (
        name not in ("references", "multiple", "nested", "repeated", "wide range")
        or "cannot be used" in found
    )
    assert (
        llm.generate("a", SamplingParams(structured_outputs={"choice": ["b"]}), use_tqdm=False)[0]
        .outputs[0]
        .text
        == "b"
    )


@pytest.mark.parametrize(
    "asked",
    [
        {"regex": "([a-z]{1,50}){1,500}"},
        {"regex": "([a-z]{1,50}[a-m]{1,50}){1,50}"},
        {"json": {"type": "string", "pattern": "^([a-z]{1,50}){1,500}$"}},
        {
            "json": {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^([a-z]{1,50}){1,500}$"}},
                "required": ["a"],
            }
        },
        {"grammar": "start: /([a-z]{1,50}){1,500}/"},
        {"structural_tag": {"format": {"type": "regex", "pattern": "([a-z]{1,50}){1,500}"}}},
    ],
    ids=repr,
)
def test_repetitions_of_repetitions_are_refused(llm, asked):
    """Random tokens are too short for a trial to find them out."""
    with pytest.raises(
        RequestError,
        match=r"more than 200,000 steps at first, or 200,000 with a token; the usual reason is a "
        r"repet",
    ) as error:
        llm.generate("a", SamplingParams(structured_outputs=asked), use_tqdm=False)
    assert error.value.param == "structured_outputs"


def test_what_becomes_too_complex_fails_alone(llm):
    """The 48th token of the longest is the first that takes too much."""
    later = "(" + "|".join("a" * i for i in range(1, 100)) + "){1,100}"
    given = [
        SamplingParams(
            structured_outputs={"regex": one}, temperature=0, max_tokens=200, ignore_eos=True
        )
        for one in (later, "b{30}")
    ]
    failed, other = llm.generate(["a"] * 2, given, use_tqdm=False)
    assert failed.error.startswith(
        f"{OF_THE_REQUEST} ask for a structure that is too complex: its regular expressions take "
        "more than"
    )
    assert failed.outputs[0].finish_reason == "error" and "plugin" not in failed.error
    assert other.error is None and other.outputs[0].text == "b" * 30


def test_others_go_on():
    asyncio.run(others_go_on())


async def others_go_on():
    """While one grammar is compiled, tokens are drawn for others."""
    async with AsyncLLM(VllmConfig.make(model="tiny")) as llm:

        async def ask(asked, request_id, **params):
            given = SamplingParams(structured_outputs=asked, max_tokens=30, seed=1, **params)
            return [output async for output in llm.generate("a", given, request_id=request_id)][
                -1
            ].outputs[0]

        await ask({"regex": "[a-c]{5}"}, "first")
        bombs = [
            asyncio.create_task(
                ask(BOMBS["multiple"] | {"disable_any_whitespace": bool(i)}, f"bomb{i}")
            )
            for i in range(2)
        ]
        await asyncio.sleep(0)
        plain = await ask(None, "plain", ignore_eos=True)
        known = await ask({"regex": "[a-c]{5}"}, "known")
        assert len(plain.token_ids) == 30 and len(known.text) == 5
        assert not all(bomb.done() for bomb in bombs)
        for error in await asyncio.gather(*bombs, return_exceptions=True):
            assert isinstance(error, RequestError) and "takes more than 1 s" in str(error)
    assert threading.active_count() < 100
