"""The routes over a fake engine: shapes, streams, errors."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Annotated, Any

import msgspec
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from toolkit_lm.errors import ConfigError, EngineDeadError, PluginError, RequestError
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.params import SAMPLING_PARAMS
from toolkit_lm.plugin import hookimpl
from toolkit_lm_server.app import create_app, create_router
from toolkit_lm_server.completions import CompletionBody
from toolkit_lm_server.event_stream import JsonLines
from toolkit_lm_server.generation import model_failure
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.protocol import ChatBody

pytestmark = pytest.mark.anyio
CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}


def events_of(response) -> list:
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


async def test_chat(make_engine, client_of):
    engine = make_engine(scheduling_policy="priority")
    client = client_of(create_app(engine))
    reply = (
        await client.post(
            CHAT,
            json={
                **HI,
                "model": "fake",
                "n": 2,
                "seed": 3,
                "top_k": 5,
                "user": "me",
                "priority": -1,
            },
        )
    ).json()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert [
        (c["index"], c["message"]["content"], c["finish_reason"]) for c in reply["choices"]
    ] == [
        (0, "USER:HI;", "stop"),
        (1, "USER:HI;", "stop"),
    ]
    assert reply["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 16,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 1},
    }
    [(_, params, options)] = engine.asked
    assert (
        params.n,
        params.seed,
        params.top_k,
        params.max_tokens,
        params.temperature,
        options["priority"],
    ) == (2, 3, 5, None, 1.0, -1)


async def test_chat_stream(client):
    body = {
        **HI,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 3,
    }
    response = await client.post(CHAT, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, usage = events_of(response)
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "U"},
        {"content": "S"},
        {"content": "E"},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["stop"]
    assert [chunk["choices"][0].get("stop_reason", "") for chunk in chunks] == [""] * 3 + [None]
    assert {chunk["usage"] for chunk in chunks} == {None}
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 3)
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETE, {"prompt": "abc"})])
async def test_a_stream_with_the_usage_so_far(client, path, body):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events_of(
        await client.post(
            path, json={**body, "max_tokens": 3, "stream": True, "stream_options": options}
        )
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == ([0] if path == CHAT else []) + [1, 2, 3, 3]
    options["include_usage"] = False
    found = events_of(
        await client.post(
            path, json={**body, "max_tokens": 3, "stream": True, "stream_options": options}
        )
    )
    assert not any("usage" in chunk for chunk in found)


async def test_chat_logprobs(client):
    reply = (
        await client.post(CHAT, json={**HI, "logprobs": True, "top_logprobs": 3, "max_tokens": 1})
    ).json()
    assert reply["choices"][0]["logprobs"]["content"] == [
        {
            "token": "U",
            "logprob": -1.5,
            "bytes": [85],
            "top_logprobs": [
                {"token": "~", "logprob": -0.5, "bytes": [126]},
                {"token": "U", "logprob": -1.5, "bytes": [85]},
                {"token": "!", "logprob": -9999.0, "bytes": [33]},
            ],
        }
    ]
    chunks = events_of(
        await client.post(CHAT, json={**HI, "logprobs": True, "max_tokens": 2, "stream": True})
    )
    found = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [[(one["token"], one["top_logprobs"]) for one in f["content"]] for f in found if f] == [
        [("U", [])],
        [("S", [])],
    ]


async def test_render_options(client, engine):
    await client.post(
        CHAT,
        json={
            **HI,
            "continue_final_message": True,
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert engine.renderer.kwargs == {
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["ABC"]),
        (["abc", "de"], ["ABC", "DE"]),
        ([97, 98], ["AB"]),
        ([[97], [98, 99]], ["A", "BC"]),
    ],
)
async def test_completion_prompts(client, prompt, texts):
    reply = (await client.post(COMPLETE, json={"prompt": prompt})).json()
    assert [choice["text"] for choice in reply["choices"]] == texts
    echoed = (await client.post(COMPLETE, json={"prompt": prompt, "echo": True, "n": 2})).json()
    assert [choice["text"] for choice in echoed["choices"]] == [
        text.lower() + text for text in texts for _ in range(2)
    ]
    assert [choice["index"] for choice in echoed["choices"]] == list(range(2 * len(texts)))
    chunks = events_of(
        await client.post(COMPLETE, json={"prompt": prompt, "echo": True, "stream": True})
    )
    streamed = [""] * len(texts)
    for chunk in chunks:
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == [text.lower() + text for text in texts]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count("stop") == len(texts)


async def test_completion_logprobs(client, engine):
    reply = (await client.post(COMPLETE, json={"prompt": "ab", "logprobs": 1})).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["A", "B"],
        "token_logprobs": [-1.5, -1.5],
        "top_logprobs": [{"A": -1.5, "~": -0.5}, {"B": -1.5, "~": -0.5}],
        "text_offset": [0, 1],
    }
    chunks = events_of(
        await client.post(COMPLETE, json={"prompt": "ab", "logprobs": 0, "stream": True})
    )
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [1]]
    assert engine.asked[-1][1].max_tokens == 16


async def test_no_likeliest_tokens_beside_the_drawn_ones(client):
    """With `logprobs` 0 the tables have the drawn tokens alone, those of a prompt too."""
    for echo, first in ((False, []), (True, [None, {"b": -2.5}])):
        reply = (
            await client.post(COMPLETE, json={"prompt": "ab", "logprobs": 0, "echo": echo})
        ).json()
        assert reply["choices"][0]["logprobs"]["top_logprobs"] == [*first, {"A": -1.5}, {"B": -1.5}]


async def test_echo_with_logprobs(client):
    body = {"prompt": "ab", "logprobs": 1, "echo": True, "n": 2}
    whole = [
        choice["logprobs"] for choice in (await client.post(COMPLETE, json=body)).json()["choices"]
    ]
    assert (
        whole
        == [
            {
                "tokens": ["a", "b", "A", "B"],
                "token_logprobs": [None, -2.5, -1.5, -1.5],
                "top_logprobs": [None, {"b": -2.5}, {"A": -1.5, "~": -0.5}, {"B": -1.5, "~": -0.5}],
                "text_offset": [0, 1, 2, 3],
            }
        ]
        * 2
    )
    parts: list[dict] = [{}, {}]
    for chunk in events_of(await client.post(COMPLETE, json={**body, "stream": True})):
        [choice] = chunk["choices"]
        for name, values in choice["logprobs"].items():
            parts[choice["index"]].setdefault(name, []).extend(values)
    assert parts == whole


async def test_prompt_logprobs(client, engine):
    expected = [None, {"98": {"logprob": -2.5, "rank": 3, "decoded_token": "b"}}]
    reply = (await client.post(COMPLETE, json={"prompt": "ab", "prompt_logprobs": 2})).json()
    assert reply["choices"][0]["prompt_logprobs"] == expected
    assert (await client.post(CHAT, json={**HI, "prompt_logprobs": 2})).json()["prompt_logprobs"][
        0
    ] is None
    assert engine.asked[-1][1].prompt_logprobs == 2
    for path, body in ((CHAT, HI), (COMPLETE, {"prompt": "ab"})):
        reply = (await client.post(path, json=body)).json()
        assert (reply if path == CHAT else reply["choices"][0])["prompt_logprobs"] is None


async def test_sampling_parameters_go_by_name(client, engine):
    given = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "min_p": 0.1,
        "bad_words": ["no"],
        "allowed_token_ids": [65, 66],
    }
    assert (
        await client.post(COMPLETE, json={"prompt": "a", "logit_bias": {"65": -100}, **given})
    ).status_code == 200
    params = engine.asked[-1][1]
    assert {name: getattr(params, name) for name in given} == given
    assert params.logit_bias == {65: -100}
    search = {
        "n": 2,
        "use_beam_search": True,
        "beam_width": 3,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    for given in (search, {"best_of": 3, "n": 2}, {"best_of": 1, "stream": True}):
        assert (await client.post(COMPLETE, json={"prompt": "a", **given})).status_code == 200
        params = engine.asked[-1][1]
        assert {name: getattr(params, name) for name in given if name != "stream"} == {
            k: v for k, v in given.items() if k != "stream"
        }


async def test_models_and_version(client):
    [card] = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("fake", 64)
    assert (card["root"], card["parent"], card["permission"][0]["allow_sampling"]) == (
        "fake",
        None,
        True,
    )
    assert (await client.get("/v1/models/fake")).json() == card
    assert (await client.get("/v1/models/some/other")).status_code == 404
    assert set((await client.get("/version")).json()) == {"version"}


async def test_each_name_of_the_model_is_served(make_engine, client_of):
    """Answers tell the first."""
    async with client_of(create_app(make_engine(served_model_name=["one", "two/2"]))) as client:
        assert [card["id"] for card in (await client.get("/v1/models")).json()["data"]] == [
            "one",
            "two/2",
        ]
        assert (await client.get("/v1/models/two/2")).json()["id"] == "two/2"
        for name in ("one", "two/2"):
            assert (await client.post(COMPLETE, json={"prompt": "a", "model": name})).json()[
                "model"
            ] == "one"
        wrong = await client.post(COMPLETE, json={"prompt": "a", "model": "fake"})
        assert (wrong.status_code, wrong.json()["error"]["message"][-26:]) == (
            404,
            "server has 'one', 'two/2'.",
        )


async def test_tokenize_and_detokenize(client):
    reply = (
        await client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True})
    ).json()
    assert reply == {
        "count": 2,
        "max_model_len": 64,
        "tokens": [97, 98],
        "token_strs": ["<a>", "<b>"],
    }
    assert (await client.post("/tokenize", json=HI)).json()["count"] == 8
    assert (await client.post("/detokenize", json={"tokens": [97, 98]})).json() == {"prompt": "ab"}


BAD = [
    (CHAT, {**HI, "model": "other"}, 404, "model", "model_not_found"),
    (CHAT, {}, 400, "messages", "missing_required_parameter"),
    (CHAT, {"messages": "hi"}, 400, "messages", None),
    (CHAT, {"messages": ["hi"]}, 400, "messages", None),
    (CHAT, {"messages": [{"role": "bad"}]}, 400, "messages", None),
    (
        CHAT,
        {**HI, "stream": False, "stream_options": {"include_usage": True}},
        400,
        "stream_options",
        None,
    ),
    (CHAT, {**HI, "top_logprobs": 2}, 400, "top_logprobs", None),
    (CHAT, {**HI, "tools": [{"type": "function"}]}, 400, "tools", None),
    (CHAT, {**HI, "tool_choice": "required"}, 400, "tool_choice", None),
    (
        CHAT,
        {**HI, "response_format": {"type": "json_object"}},
        400,
        "response_format",
        "unsupported_parameter",
    ),
    (CHAT, {**HI, "logit_bias": {"five": 1}}, 400, "logit_bias", None),
    (CHAT, {**HI, "logit_bias": {"5": 101}}, 400, "logit_bias", None),
    (CHAT, {**HI, "presence_penalty": 2.5}, 400, "presence_penalty", None),
    (CHAT, {**HI, "bad_words": [""]}, 400, "bad_words", None),
    (COMPLETE, {"prompt": "a", "extra_args": {"a": 1}}, 400, "extra_args", "unsupported_parameter"),
    (COMPLETE, {"prompt": "a", "xtc_probability": 0.5}, 400, "xtc_probability", None),
    (COMPLETE, {"prompt": "a", "typical_p": 0.9}, 400, "typical_p", None),
    (COMPLETE, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs", None),
    (
        CHAT,
        {**HI, "messages": [{"role": "user", "content": "x" * 100}]},
        400,
        "prompt",
        "context_length_exceeded",
    ),
    (COMPLETE, {"prompt": ""}, 400, "prompt", None),
    (COMPLETE, {"prompt": []}, 400, "prompt", None),
    (COMPLETE, {"prompt": [[]]}, 400, "prompt", None),
    (COMPLETE, {"prompt": [1, "a"]}, 400, "prompt", None),
    (COMPLETE, {"prompt": [500]}, 400, "prompt", None),
    (COMPLETE, {"prompt": ["a"] * 257}, 400, "prompt", None),
    (COMPLETE, {"prompt": "x" * 64}, 400, "prompt", "context_length_exceeded"),
    (COMPLETE, {"prompt": "refuse"}, 400, "n", None),
    (COMPLETE, {"prompt": ["a", "refuse"]}, 400, "n", None),
    (COMPLETE, {"prompt": "a", "temperature": -1}, 400, "temperature", None),
    (COMPLETE, {"prompt": "a", "temperature": "1"}, 400, "temperature", None),
    (COMPLETE, {"prompt": "a", "temperature": 1e300}, 400, "temperature", None),
    (COMPLETE, {"prompt": "a", "top_p": 0}, 400, "top_p", None),
    (COMPLETE, {"prompt": "a", "n": 0}, 400, "n", None),
    (COMPLETE, {"prompt": "a", "n": True}, 400, "n", None),
    (COMPLETE, {"prompt": "a", "n": 1.5}, 400, "n", None),
    (COMPLETE, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", None),
    (COMPLETE, {"prompt": "a", "seed": 2**70}, 400, "seed", None),
    (COMPLETE, {"prompt": "a", "priority": 2**70}, 400, "priority", None),
    (COMPLETE, {"prompt": "a", "priority": 1}, 400, "priority", None),
    (COMPLETE, {"prompt": "a", "stop": [""]}, 400, "stop", None),
    (COMPLETE, {"prompt": "a", "stop": ["x"] * 100}, 400, "stop", None),
    (COMPLETE, {"prompt": "a", "best_of": 3, "stream": True}, 400, "best_of", None),
    (COMPLETE, {"prompt": "a", "n": 3, "best_of": 2}, 400, "best_of", None),
    (
        COMPLETE,
        {"prompt": "a", "use_beam_search": True, "n": 2, "stream": True},
        400,
        "use_beam_search",
        None,
    ),
    (COMPLETE, {"prompt": "a", "use_beam_search": True, "n": 2, "top_p": 0.5}, 400, "top_p", None),
    ("/tokenize", {}, 400, "prompt", None),
    ("/tokenize", {"prompt": "a", **HI}, 400, "prompt", None),
    ("/detokenize", {"tokens": [500]}, 400, "tokens", None),
    ("/detokenize", {"tokens": [97, -1]}, 400, "tokens", None),
    ("/detokenize", {"tokens": ["a"]}, 400, "tokens", None),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), BAD)
async def test_bad_fields(client, engine, path, body, status, param, code):
    for stream in (False, True) if "/v1" in path else (None,):
        response = await client.post(
            path, json=body if stream is None else {"stream": stream, **body}
        )
        error = response.json()["error"]
        assert response.status_code == status, error
        kind = "BadRequestError" if "tokenize" in path else "invalid_request_error"
        assert (error["type"], error["param"], error["code"]) == (kind, param, code), error
        assert error["message"]
    assert engine.num_open == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "n": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
)
async def test_bad_json(client, content):
    response = await client.post(
        COMPLETE, content=content, headers={"content-type": "application/json"}
    )
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


MANY = 10**5


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": [None] * MANY},
        {"prompt": [[None]] * MANY},
        {"prompt": [[None] * MANY]},
        {"stop": [None] * MANY},
        {"allowed_token_ids": [None] * MANY},
        {"logit_bias": {str(number): None for number in range(MANY)}},
        {"extra_args": {str(number): None for number in range(MANY)}},
        {"stream_options": {str(number): None for number in range(MANY)}},
        {str(number): None for number in range(MANY)},
    ],
    ids=lambda field: next(iter(field)),
)
async def test_of_many_errors_the_first_is_enough(strict, field):
    """Each costs time and memory, on the event loop that all requests share."""
    with pytest.raises((ValidationError, RequestError)) as found:
        CompletionBody(**{"prompt": "a", **field}).params()
    assert not isinstance(found.value, ValidationError) or found.value.error_count() <= 4
    assert (await strict.post(COMPLETE, json={"prompt": "a", **field})).status_code == 400


@pytest.fixture
async def strict(engine, client_of):
    async with client_of(create_app(engine, ServerOptions(strict_fields=True))) as one:
        yield one


async def test_an_unknown_field_is_a_warning(client, caplog):
    """Told in the answer, and once in the log. What a plugin that is missing would do is not left
    out without a word."""
    for _ in range(2):
        body = {
            "prompt": "a",
            "temprature": 1,
            "stream": True,
            "stream_options": {"include_use": True},
            "nothing": None,
            "empty": {},
        }
        reply = await client.post(COMPLETE, json=body)
        assert (reply.status_code, reply.headers["x-ignored-fields"]) == (
            200,
            "temprature, stream_options.include_use",
        )
    assert "x-ignored-fields" not in (await client.post(COMPLETE, json={"prompt": "a"})).headers
    assert [record.message for record in caplog.records if "temprature" in record.message] == [
        (
            "the field temprature of a request is ignored: this server does not know it. Did you "
            "mean 'temperature'?"
        )
    ]
    for name in ("guided_json", "dry_base"):
        assert (await client.post(COMPLETE, json={"prompt": "a", name: 1})).status_code == 400
    many = {f"field_{number}": 1 for number in range(1000)}
    assert (
        len((await client.post(COMPLETE, json={"prompt": "a", **many})).headers["x-ignored-fields"])
        < 200
    )


@pytest.mark.parametrize("name", ["a\nb", "b" * 65, "c d", "\u00e9"])
async def test_what_is_no_name_is_refused(client, name):
    assert (await client.post(COMPLETE, json={"prompt": "a", name: 1})).status_code == 400


@pytest.mark.parametrize("value", [None, False])
async def test_null_and_false_stand_for_the_default(client, strict, value):
    """Of any field that has one, in any body."""
    fields = set(CompletionBody.model_fields) | {
        "tools",
        "functions",
        "suffix",
        "store",
        "audio",
        "service_tier",
    }
    for body in (
        {"prompt": "a", **dict.fromkeys(fields - {"prompt"}, value)},
        {"prompt": "a", "stream": True, "stream_options": value},
    ):
        reply = await strict.post(COMPLETE, json=body)
        assert reply.status_code == 200, reply.text
    assert (
        await client.post("/tokenize", json={"prompt": "a", "return_token_strs": value})
    ).json()["token_strs"] is None
    assert (await client.post(COMPLETE, json={"prompt": value})).status_code == 400


async def test_unknown_field_message(strict):
    client = strict
    response = await client.post(COMPLETE, json={"prompt": "a", "foo": 1})
    assert response.json()["error"]["message"] == "Unrecognized request argument supplied: foo"
    assert response.json()["error"]["param"] == "foo"
    message = (await client.post(COMPLETE, json={"prompt": "a", "dry_base": 1})).json()["error"][
        "message"
    ]
    assert message == (
        "Unrecognized request argument supplied: dry_base. It comes with toolkit-lm-sampling-extra."
    )


@pytest.mark.parametrize(
    ("path", "given", "param", "message"),
    [
        (
            COMPLETE,
            {"prompt": "a", "max_token": 1},
            "max_token",
            "max_token. Did you mean 'max_tokens'?",
        ),
        (CHAT, {**HI, "temprature": 1}, "temprature", "temprature. Did you mean 'temperature'?"),
        (
            "/tokenize",
            {"prompt": "a", "add_special_token": True},
            None,
            "add_special_token. Did you mean 'add_special_tokens'?",
        ),
        ("/rerank", {"query": "a", "document": ["b"]}, None, "document. Did you mean 'documents'?"),
        (COMPLETE, {"prompt": "a", "best of": 2}, None, "best of. Did you mean 'best_of'?"),
        (
            COMPLETE,
            {"prompt": "a", "stream": True, "stream_options": {"include_use": True}},
            "stream_options",
            "stream_options.include_use. Did you mean 'include_usage'?",
        ),
    ],
)
async def test_an_unknown_field_is_told_with_the_nearest_one(strict, path, given, param, message):
    error = (await strict.post(path, json=given)).json()["error"]
    assert error["message"] == f"Unrecognized request argument supplied: {message}"
    assert param is None or error["param"] == param


class LoudParams(ProcessorParams):
    loud_times: Annotated[float, param("How often it is loud.", ge=0)] = 1
    loud_words: Annotated[list[str | int] | None, param("What is loud.")] = None
    loud_table: Annotated[dict[str, Any] | None, param("How loud.")] = None


class PromptParams(ProcessorParams):
    prompt: Annotated[int, param("Not the prompt.")] = 1


class Processors:
    name = "processors"

    def __init__(self, params):
        self.params = params

    @hookimpl
    def toolkit_register_logits_processors(self, processors):
        processors.add("loud", "nowhere:Loud", params=self.params)


@pytest.mark.parametrize(("path", "body"), [(CHAT, HI), (COMPLETE, {"prompt": "a"})])
async def test_parameters_of_logits_processors_are_fields(make_engine, client_of, path, body):
    engine = make_engine([Processors(LoudParams)])
    engine.processor = SimpleNamespace(parts=SimpleNamespace(by_name={}))
    client = client_of(create_app(engine))
    given = {"loud_times": 3, "loud_words": ["a", 5], "loud_table": {"a": 1}}
    assert (await client.post(path, json={**body, **given})).status_code == 200
    assert engine.asked[-1][1].extra_args == given
    assert (
        await client.post(path, json={**body, "loud_words": None, "loud_times": 2})
    ).status_code == 200
    assert engine.asked[-1][1].extra_args == {"loud_times": 2}
    assert (await client.post(path, json=body)).status_code == 200
    assert engine.asked[-1][1].extra_args is None
    error = (await client.post(path, json={**body, "loud_words": [None] * MANY})).json()["error"]
    assert error["param"] == "loud_words"
    schema = (await client.get("/openapi.json")).json()
    name = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"][
        "$ref"
    ].rpartition("/")[2]
    assert name == {CHAT: "ChatBody", COMPLETE: "CompletionBody"}[path]
    assert {"loud_times", "loud_words", "loud_table", "top_p"} <= set(
        schema["components"]["schemas"][name]["properties"]
    )
    # Another engine of this process has other plugins.
    other = client_of(create_app(make_engine()))
    assert (await other.post(path, json={**body, "loud_times": 2})).headers[
        "x-ignored-fields"
    ] == "loud_times"


async def test_a_parameter_of_a_logits_processor_that_is_a_field_already(make_engine):
    with pytest.raises(
        PluginError,
        match=r"processors.*: logits processor 'loud': 'prompt' is a field of HTTP requests "
        r"already\.",
    ):
        create_app(make_engine([Processors(PromptParams)]))


POSTED = (
    CHAT,
    COMPLETE,
    "/v1/embeddings",
    "/v1/embed",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v2/rerank",
    "/tokenize",
    "/detokenize",
)


@pytest.mark.parametrize("path", POSTED)
async def test_lone_surrogates_in_names_of_fields(client, path):
    response = await client.post(
        path, content=r'{"\ud800": 1}', headers={"content-type": "application/json"}
    )
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, r"\ud800")
    assert error["message"] == r"Unrecognized request argument supplied: \ud800"


@pytest.mark.parametrize(
    "fields",
    [
        r'"model": "\ud800"',
        r'"stream": true, "stream_options": {"\ud800": 1}',
        r'"logit_bias": {"\ud800": 1}',
        r'"extra_args": {"\ud800": 1}',
        r'"temperature": "\ud800"',
        r'"stop": {"\ud800": 1}',
        r'"tools": "\ud800"',
        r'"cache_salt": 1, "user": "\ud800"',
        r'"early_stopping": "\ud800"',
    ],
)
async def test_lone_surrogates_in_values(client, fields):
    response = await client.post(
        COMPLETE,
        content=f'{{"prompt": "a", {fields}}}',
        headers={"content-type": "application/json"},
    )
    assert response.status_code in (400, 404), response.text


async def test_what_errors_repeat_is_cut(client):
    long = "x" * 10**6
    bodies = [
        (COMPLETE, {"prompt": "a", long: 1}),
        (COMPLETE, {"prompt": "a", "model": long}),
        ("/pooling", {"input": "a", "task": long}),
    ]
    for path, body in bodies:
        reply = await client.post(path, json=body)
        assert reply.status_code in (400, 404)
        assert "xxx..." in reply.text and len(reply.content) < 2000
    assert len((await client.get(f"/v1/models/{'x' * 10_000}")).content) < 2000


async def test_neutral_fields_are_accepted(client):
    neutral = {
        "presence_penalty": 0,
        "logit_bias": {},
        "tools": None,
        "response_format": {"type": "text"},
        "store": False,
        "metadata": {"a": "b"},
    }
    assert (await client.post(CHAT, json={**HI, **neutral})).status_code == 200


@pytest.mark.parametrize(
    "field",
    [{"moderation": 0}, {"moderation": True}, {"functions": [{}]}, {"audio": {"voice": "x"}}],
)
async def test_fields_that_would_have_an_effect_are_refused(client, field):
    """Types count: 0 is not false."""
    error = (await client.post(CHAT, json={**HI, **field})).json()["error"]
    assert (error["param"], error["code"]) == (*field, "unsupported_parameter")


async def test_a_body_that_is_not_json_or_too_large(engine, client_of):
    async with client_of(create_app(engine, ServerOptions(max_body_size="100"))) as client:
        assert (await client.post(COMPLETE, content=b"prompt=a")).status_code == 400
        large = b'{"prompt": "%s"}' % (b"x" * 100)
        headers = {"content-type": "application/json"}
        declared = await client.post(COMPLETE, content=large, headers=headers)

        async def pieces():
            yield large[:60]
            yield large[60:]

        chunked = await client.post(COMPLETE, content=pieces(), headers=headers)
        for response in (declared, chunked):
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "request_too_large"


async def test_unknown_paths_and_methods(client):
    for response, status in ((await client.get("/nothing"), 404), (await client.get(CHAT), 405)):
        assert response.status_code == status
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "header", [None, "Bearer wrong", "Bearer", "Basic secret", "Bearer sécret".encode("latin-1")]
)
async def test_api_key(engine, client_of, header):
    app = create_app(engine, ServerOptions(api_key="secret"), metrics=Metrics())
    async with client_of(app) as client:
        for path in ("/v1/models", "/version", "/metrics", "/v1/models/x"):
            response = await client.get(
                path, headers={} if header is None else {"authorization": header}
            )
            assert (response.status_code, response.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
        assert (await client.post(CHAT, json=HI)).status_code == 401
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/openapi.json")).status_code == 404
        assert (
            await client.post(CHAT, json=HI, headers={"authorization": "Bearer secret"})
        ).status_code == 200


async def test_internal_errors_tell_nothing(client, engine, caplog):
    engine.failure = RuntimeError("password is hunter2")
    with caplog.at_level(logging.CRITICAL, "toolkit_lm_server"):
        response = await client.post(CHAT, json=HI)
        streamed = events_of(await client.post(CHAT, json={**HI, "stream": True}))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == streamed[-1]["error"]["type"] == "server_error"
    assert "hunter2" not in response.text + json.dumps(streamed)


async def test_a_dead_engine_tells_why(client, engine):
    engine.failure = EngineDeadError("the engine has died: MemoryError: no more")
    response = await client.post(CHAT, json=HI)
    streamed = events_of(await client.post(CHAT, json={**HI, "stream": True}))
    assert (response.status_code, response.json()) == (503, streamed[-1])
    assert (streamed[-1]["error"]["code"], streamed[-1]["error"]["message"]) == (
        "engine_dead",
        "the engine has died: MemoryError: no more",
    )


async def test_a_sequence_that_fails(client, engine):
    response = await client.post(COMPLETE, json={"prompt": "broken"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "model_error")
    assert engine.num_open == 0


def test_where_the_files_of_plugins_lie_goes_to_the_log_only(caplog):
    error = model_failure(
        "this request",
        "plugin 'p' (toolkit-lm-p 0.1.0, /plugins/src/p.py:13) failed in a step: ValueError: no\n"
        "line",
    )
    assert str(error) == (
        "The model failed on this request: plugin 'p' (toolkit-lm-p 0.1.0) failed in a step: "
        "ValueError: no\nline."
    )
    [line] = caplog.messages
    assert "/plugins/src/p.py:13" in line and "\n" not in line


async def call(app, path: str, body: dict, leave_when) -> list:
    """Speaks ASGI with the app, and disconnects when `leave_when()`."""
    sent = []
    queue = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive():
        if queue:
            return queue.pop()
        while not leave_when(sent):
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": headers,
        "http_version": "1.1",
    }
    scope |= {
        "scheme": "http",
        "server": ("test", 80),
        "client": ("test", 1),
        "root_path": "",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }
    await asyncio.wait_for(app(scope, receive, send), 30)
    return sent


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["hang", ["hang", "quick"], ["hang", "hang"]])
async def test_disconnect_aborts(engine, stream, prompt):
    other = asyncio.create_task(
        call(create_app(engine), COMPLETE, {"prompt": "beside"}, lambda sent: False)
    )
    sent = await call(
        create_app(engine),
        COMPLETE,
        {"prompt": prompt, "stream": stream, "n": 2},
        lambda sent: len(sent) > 2 or not stream,
    )
    assert engine.num_open <= 1
    assert b"[DONE]" not in b"".join(message.get("body", b"") for message in sent)
    assert b"BESIDE" in b"".join(message.get("body", b"") for message in await other)
    assert engine.num_open == 0


async def test_disconnect_before_the_body_is_read(engine):
    app = create_app(engine)

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        pass

    scope = {
        "type": "http",
        "method": "POST",
        "path": COMPLETE,
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
    }
    await asyncio.wait_for(app({**scope, "root_path": ""}, receive, send), 30)
    assert engine.asked == []


async def test_mounted_in_another_app(engine, client_of):
    app = FastAPI()
    app.include_router(create_router(engine, ServerOptions(api_key="secret")), prefix="/llm")
    async with client_of(app) as client:
        assert (await client.post("/llm" + CHAT, json=HI)).json()["error"][
            "code"
        ] == "invalid_api_key"
        headers = {"authorization": "Bearer secret"}
        assert (await client.post("/llm" + CHAT, json=HI, headers=headers)).json()["choices"]
        assert (await client.post("/llm" + COMPLETE, content=b"{", headers=headers)).json()[
            "error"
        ]["type"] == "invalid_request_error"
        assert (await client.get("/llm/metrics", headers=headers)).status_code == 404


async def test_openapi_describes_the_bodies(client):
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    body = schemas["CompletionBody"]["properties"]
    assert {"minimum": 0.001, "maximum": 1000}.items() <= body["repetition_penalty"].items()
    assert body["best_of"]["description"] == SAMPLING_PARAMS["best_of"].help
    assert {"maxItems": 64, "maxLength": 1024}.items() <= body["stop"].items()
    assert body["logit_bias"]["maxProperties"] == 300
    values = [one.get("const") for one in body["tool_choice"]["anyOf"]]
    assert values == [None, False, "none", "auto"]


@pytest.mark.parametrize(
    ("key", "limit"), [(None, ""), ("secret", ""), ("secret", ", max_sequences: 3")]
)
async def test_openapi_describes_the_answers(engine, key, limit, tmp_path):
    (tmp_path / "keys").write_text(f"keys: [{{name: a, key: other{limit}}}]")
    options = ServerOptions(api_key=key, api_keys_file=str(tmp_path / "keys") if key else None)
    paths = create_app(engine, options, metrics=Metrics()).openapi()["paths"]
    found = {
        path: set(operation["responses"])
        for path, operations in paths.items()
        for operation in operations.values()
    }
    assert (
        found.pop("/live")
        == found.pop("/health")
        == found.pop("/ready")
        == found.pop("/ping")
        == {"200", "503"}
    )
    every = {"200", "400", "413", "415", "500", "default"} | ({"401"} if key else set())
    for path, statuses in found.items():
        ready = set() if path in ("/version", "/metrics") else {"503", *(["429"] if limit else [])}
        model = (
            {"404"}
            if path
            in (
                *POSTED,
                f"{CHAT}/batch",
                "/v1/models/{model}",
                "/infill",
                "/invocations",
                "/v1/responses",
                "/v1/score",
                "/rerank",
                "/v1/rerank",
            )
            else set()
        )
        work = {"429", "504"} if model and "token" not in path and "models" not in path else set()
        assert statuses == every | ready | model | work, path


class Hello:
    name = "hello"

    @hookimpl
    def toolkit_register_routes(self, router, engine):
        @router.get("/hello")
        async def hello(size: int = 1) -> dict[str, str]:
            return {"model": engine.config.served_model_name * size}


async def test_toolkit_register_routes(make_engine, client_of):
    engine = make_engine([Hello()])
    async with client_of(create_app(engine)) as client:
        assert (await client.get("/hello")).status_code == 404
    async with client_of(
        create_app(engine, ServerOptions(routes=["hello"], api_key="secret"))
    ) as client:
        assert (await client.get("/hello")).json()["error"]["code"] == "invalid_api_key"
        headers = {"authorization": "Bearer secret"}
        assert (await client.get("/hello?size=2", headers=headers)).json() == {"model": "fakefake"}
        assert (await client.get("/hello?size=a", headers=headers)).status_code == 400


class Translated:
    """Another vendor's API, by means of the server's own."""

    name = "translated"

    @hookimpl
    def toolkit_register_routes(self, router, engine, api):
        class Route(router.route_class):
            @staticmethod
            def refusal(error):
                return JSONResponse({"wrong": str(error)}, error.status)

        async def say(text: str, request: Request, stream: bool = False) -> Response:
            answer = await api.chat.ask(
                {
                    "messages": [{"role": "user", "content": text}],
                    "stream": stream,
                    "top_k": "x"[len(text) - 1 :] or 1,
                },
                {},
            )
            if stream:
                return JsonLines(answer.chunks(), answer)
            return JSONResponse(await answer.completion())

        router.add_api_route("/say", say, response_model=None, route_class_override=Route)


async def test_routes_that_translate(make_engine, client_of):
    engine = make_engine([Translated()])
    async with client_of(
        create_app(engine, ServerOptions(routes=["translated"], api_key="secret"))
    ) as client:
        refused = await client.get("/say?text=hi", headers={"x-api-key": "other"})
        assert (refused.status_code, list(refused.json())) == (401, ["wrong"])
        key = {"x-api-key": "secret"}
        whole = (await client.get("/say?text=hi", headers=key)).json()
        assert (
            whole["choices"][0]["message"]["content"] == "USER:HI;"
            and whole["usage"]["completion_tokens"] == 8
        )
        lines = (await client.get("/say?text=hi&stream=true", headers=key)).text.splitlines()
        assert (
            "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)
            == "USER:HI;"
        )
        wrong = await client.get("/say?text=a", headers=key)
        assert (wrong.status_code, wrong.json()["wrong"]) == (
            400,
            "Invalid value for 'top_k': it must be a whole number, not \"x\".",
        )
    with pytest.raises(ConfigError, match="'none' has HTTP routes"):
        create_app(engine, ServerOptions(routes=["none"]))
    async with client_of(create_app(engine)) as client:
        assert (await client.get("/say?text=hi")).status_code == 404, (
            "its name is not one of those that are served unasked"
        )


async def test_routes_of_an_unknown_plugin(make_engine):
    with pytest.raises(ConfigError, match=r"'helo' has HTTP routes\. Did you mean 'hello'"):
        create_app(make_engine([Hello()]), ServerOptions(routes=["helo"]))


def _nothing() -> None:
    pass


def _websocket(router):
    @router.websocket("/live")
    async def live(socket):
        pass


def _mount(router):
    router.mount("/app", FastAPI())


def _plain(router):
    router.add_api_route("/plain", _nothing, route_class_override=APIRoute)


def _nested(router):
    inner = APIRouter()
    inner.add_api_route("/inner", _nothing)
    router.include_router(inner)


def _taken(router):
    router.add_api_route("/health", _nothing)


def _raising(router):
    raise ValueError("no routes today")


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (_websocket, "not a plain HTTP route"),
        (_mount, "not a plain HTTP route"),
        (_plain, "not a plain HTTP route"),
        (_nested, "not a plain HTTP route"),
        (_taken, "the route GET /health is in use"),
        (_raising, "failed in toolkit_register_routes: ValueError: no routes today"),
    ],
)
async def test_routes_that_are_refused(make_engine, add, message):
    class Bad:
        name = "bad"

        @hookimpl
        def toolkit_register_routes(self, router, engine):
            add(router)

    with pytest.raises(PluginError, match=message):
        create_app(make_engine([Bad()]), ServerOptions(routes=["bad"]))


async def test_a_route_takes_the_place_of_the_servers(make_engine, client_of):
    class Other:
        name = "other"

        @hookimpl
        def toolkit_register_routes(self, router):
            kind = type("Replacing", (router.route_class,), {"replaces": True})
            router.add_api_route("/load", lambda: {"mine": 1}, route_class_override=kind)

    app = create_app(make_engine([Other()]), ServerOptions(routes=["other"]))
    async with client_of(app) as client:
        assert (await client.get("/load")).json() == {"mine": 1}
        assert (await client.get("/version")).status_code == 200


@pytest.mark.parametrize("way", ["own app", "included"])
async def test_routes_get_options_and_a_lifespan(make_engine, way):
    seen = []

    class Options(msgspec.Struct):
        word: str = "up"

    class Good:
        name = "good"

        @hookimpl
        def toolkit_register_routes(self, router, engine, options):
            @asynccontextmanager
            async def lifespan():
                seen.append(options.word)
                yield
                seen.append("down")

            return lifespan

    plugin = Good()
    plugin.Options = Options
    engine = make_engine([plugin])
    options = ServerOptions(routes=["good"])
    app = create_app(engine, options)
    if way == "included":
        app = FastAPI()
        app.include_router(create_router(engine, options))
    async with app.router.lifespan_context(app):
        assert seen == ["up"]
    assert seen == ["up", "down"]


async def test_a_lifespan_that_fails_names_its_plugin(make_engine):
    class Bad:
        name = "bad"

        @hookimpl
        def toolkit_register_routes(self, router, engine):
            @asynccontextmanager
            async def lifespan():
                raise OSError("no database")
                yield

            return lifespan

    app = create_app(make_engine([Bad()]), ServerOptions(routes=["bad"]))
    with pytest.raises(
        PluginError,
        match=r"plugin 'bad' .*failed in the lifespan of its routes: OSError: no database",
    ):
        async with app.router.lifespan_context(app):
            raise AssertionError("it does not get here")


@pytest.mark.parametrize(
    "options",
    [
        {"max_body_size": "50%"},
        {"max_body_size": "much"},
        {"max_header_size": "much"},
        {"api_key": ""},
        {"api_key": []},
        {"api_key": ["secret", ""]},
        {"api_key": "sécret"},
        {"api_key": "secret\n"},
        {"api_key": "sec\x00ret"},
    ],
)
async def test_wrong_options(options):
    with pytest.raises(ConfigError):
        ServerOptions(**options)


async def test_the_entry_module_is_light():
    code = (
        "import sys, toolkit_lm_server; assert not {'fastapi', 'uvicorn', 'pydantic', 'torch'} & "
        "set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("body", [ChatBody, CompletionBody])
async def test_a_body_has_a_field_for_each_sampling_parameter(body):
    elsewhere = {"detokenize", "extra_args"}
    assert set(SAMPLING_PARAMS) - set(body.model_fields) == elsewhere
    assert all(
        body.model_fields[name].default is None for name in SAMPLING_PARAMS if name not in elsewhere
    )


async def test_bodies_are_bounded_together(engine, client_of):
    """Each may be of max_body_size, and 16 of them at a time, with the copies of each; the next one
    is asked to come again."""
    gate = asyncio.Event()
    arrived = []
    most = 2**16

    async def parts():
        yield b'{"prompt": "abc", "max_tokens": 1' + b" " * (most - 100)
        arrived.append(1)
        await gate.wait()
        yield b" " * 60 + b"}"

    def post(client):
        return client.post(
            "/v1/completions", content=parts(), headers={"content-type": "application/json"}
        )

    async with client_of(create_app(engine, ServerOptions(max_body_size=str(most)))) as client:
        waiting = [asyncio.create_task(post(client)) for _ in range(100)]
        while len(arrived) + sum(one.done() for one in waiting) < 100:
            await asyncio.sleep(0)
        gate.set()
        answers = await asyncio.gather(*waiting)
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 503} and codes.count(200) >= 16
        busy = answers[codes.index(503)]
        assert busy.json()["error"]["code"] == "server_busy" and "retry-after" in busy.headers
        # Their memory is free again.
        assert [(await post(client)).status_code for _ in range(40)] == [200] * 40


@pytest.mark.parametrize("most", ["100", "16MiB"])
async def test_no_body_is_too_much_where_it_is_the_only_one(engine, client_of, most):
    """However many of its characters could begin a value."""
    options = ServerOptions(max_body_size=most)
    room = options.max_body_bytes - 40
    async with client_of(create_app(engine, options)) as client:
        for character in ("a", ",", "[", ": "):
            text = character * (room // len(character))
            reply = await client.post(
                "/v1/completions", content=json.dumps({"prompt": "abc", "x": text})
            )
            assert reply.status_code != 503, reply.text


async def test_several_conversations(client, engine):
    """Each has its choices, in order; their tokens are added."""
    talks = [[{"role": "user", "content": text}] for text in ("one", "two")]
    reply = (await client.post(f"{CHAT}/batch", json={"messages": talks, "n": 2})).json()
    assert [(one["index"], one["message"]["content"]) for one in reply["choices"]] == [
        (index, f"USER:{text};") for index, text in enumerate(("ONE", "ONE", "TWO", "TWO"))
    ]
    alone = (await client.post(CHAT, json={"messages": talks[0], "n": 2})).json()["usage"]
    assert {name: reply["usage"][name] for name in ("prompt_tokens", "completion_tokens")} == {
        name: 2 * alone[name] for name in ("prompt_tokens", "completion_tokens")
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [HI["messages"]] * 20_000}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": HI["messages"]}, "messages"),
        ({"messages": [HI["messages"]], "stream": True}, "stream"),
        ({"messages": [HI["messages"]], "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
async def test_several_conversations_that_are_refused(client, body, param):
    response = await client.post(f"{CHAT}/batch", json=body)
    assert (
        response.status_code,
        response.json()["error"]["param"].split(".")[0].split("[")[0],
    ) == (400, param), response.text
