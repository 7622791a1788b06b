"""Structured output over HTTP, and beside drafts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import jsonschema
import pytest
from toolkit_lm import LLM, AsyncLLM, SamplingParams, VllmConfig
from toolkit_lm_server.app import create_app

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "people": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["city", "people"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "Tell me of a city."}]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@asynccontextmanager
async def client(**options):
    config = VllmConfig.make(model="tiny", dtype="float32", **options)
    async with (
        AsyncLLM(config) as llm,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(llm)), base_url="http://test"
        ) as http,
    ):
        yield http


async def streamed(client, path, **body):
    """The texts of the choices of a stream."""
    found = {}
    async with client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    new = (
                        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    )
                    found[choice["index"]] = found.get(choice["index"], "") + new
    return [found[index] for index in sorted(found)]


@pytest.mark.anyio
async def test_both_routes_whole_and_streamed():
    async with client() as http:
        common = {"n": 4, "seed": 1, "max_tokens": 100, "temperature": 1.5}
        for path, body, asked in (
            (CHAT, {"messages": MESSAGES}, {"response_format": FORMAT}),
            (COMPLETE, {"prompt": "A city:"}, {"response_format": FORMAT}),
            (
                CHAT,
                {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2},
                {"structured_outputs": {"json": SCHEMA}},
            ),
            (
                COMPLETE,
                {"prompt": "A city:", "logprobs": 1, "echo": False},
                {"guided_json": json.dumps(SCHEMA)},
            ),
        ):
            answer = await http.post(path, json={**common, **body, **asked})
            assert answer.status_code == 200, answer.text
            choices = answer.json()["choices"]
            texts = [
                choice["text"] if "text" in choice else choice["message"]["content"]
                for choice in choices
            ]
            for choice, text in zip(choices, texts, strict=True):
                if choice["finish_reason"] == "stop":
                    jsonschema.validate(json.loads(text), SCHEMA)
            assert any(choice["finish_reason"] == "stop" for choice in choices)
            assert await streamed(http, path, **common, **body, **asked) == texts


@pytest.mark.anyio
async def test_what_asks_for_nothing_changes_nothing():
    async with client() as http:
        body = {"messages": MESSAGES, "seed": 1, "max_tokens": 10}
        plain = (await http.post(CHAT, json=body)).json()["choices"]
        for none in (
            {"response_format": {"type": "text"}},
            {"response_format": None},
            {"structured_outputs": None},
            {"guided_json": None},
        ):
            assert (await http.post(CHAT, json={**body, **none})).json()["choices"] == plain
        beams = {
            "prompt": "a",
            "use_beam_search": True,
            "n": 2,
            "temperature": 0,
            "response_format": {"type": "text"},
        }
        assert (await http.post(COMPLETE, json=beams)).status_code == 200


WRONG = [
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"items": {"not": {}}}},
            }
        },
        "response_format",
        "at #/items",
    ),
    ({"response_format": {"type": "yaml"}}, "response_format", "must be one of"),
    ({"response_format": 5}, "response_format", "Invalid value"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed"),
    ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "list of texts"),
    ({"guided_grammar": "root ::= x"}, "guided_grammar", "x"),
    ({"guided_choice": ["a", 5]}, "guided_choice", "Invalid value"),
    (
        {"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2, "temperature": 0},
        "structured_outputs",
        "no effect",
    ),
    (
        {"guided_regex": "a", "use_beam_search": True, "n": 2, "temperature": 0},
        "guided_regex",
        "no effect",
    ),
]


@pytest.mark.anyio
async def test_what_is_wrong_is_a_400():
    async with client() as http:
        for asked, param, message in WRONG:
            await refused(http, asked, param, message)


async def refused(http, asked, param, message):
    for path, body in ((CHAT, {"messages": MESSAGES}), (COMPLETE, {"prompt": "a"})):
        answer = await http.post(path, json={**body, **asked})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert message in error["message"]


@pytest.mark.anyio
async def test_without_the_plugin():
    async with client(disable_plugins=["structured_output"]) as http:
        answer = await http.post(
            COMPLETE, json={"prompt": "a", "structured_outputs": {"regex": "a"}}
        )
        assert answer.status_code == 400
        assert (
            "'structured_outputs'. It comes with toolkit-lm-structured-output."
            in answer.json()["error"]["message"]
        )
        answer = await http.post(
            COMPLETE, json={"prompt": "a", "response_format": {"type": "json_object"}}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "response_format")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_follow_the_grammar(temperature):
    """A draft that the grammar does not allow is not drawn, and drafts change nothing."""
    prompts = ["a b c d " * 6, "One day one day one day", "1 2 1 2 1 2 1 2"]
    asked = [
        {"regex": "(a b c d ?|e){3,12}"},
        {"json": SCHEMA},
        {"grammar": 'root ::= ("1 2 " | "3")+'},
    ]
    params = [
        SamplingParams(
            max_tokens=40, seed=2, temperature=temperature, structured_outputs=one, logprobs=1
        )
        for one in asked
    ]
    found = []
    for options in ({}, {"drafter": "ngram"}):
        with LLM("tiny", dtype="float32", **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.error for output in outputs] == [None] * 3
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_the_benchmark_runs():
    """Nothing is timed here."""
    script = Path(__file__).parents[1] / "benchmarks" / "structured.py"
    run = subprocess.run(
        [sys.executable, script, "--quick", "--only", "mask,json"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert re.findall(
        r"llguidance: (\w+), 4 rows, \d+ tokens each: .* ratio [\d.]+", run.stdout
    ) == ["mask", "json"]
