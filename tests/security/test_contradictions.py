"""Sampling parameters that leave no token: the answer is 400 and names them, whatever its form, and
nobody else suffers."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app

A = 68
B = 69
Q = 84
EOS = 3
"""Tokens of the embedded model: the first is the word "a", the last one ends a text."""

AT_ONCE = {
    "the allowed token is a bad word": {"allowed_token_ids": [A], "bad_words": ["a"]},
    "both are bad words": {"allowed_token_ids": [A, B], "bad_words": ["b", "a"]},
    "only the end is allowed, and not yet": {"allowed_token_ids": [EOS], "min_tokens": 2},
    "only a stop token is allowed, and not yet": {
        "allowed_token_ids": [A],
        "stop_token_ids": [A],
        "min_tokens": 1,
    },
    "of two, one is bad and one comes too early": {
        "allowed_token_ids": [A, EOS],
        "bad_words": ["a"],
        "min_tokens": 1,
    },
    "a bias takes nothing back": {
        "allowed_token_ids": [A],
        "bad_words": ["a"],
        "logit_bias": {f"{A}": 100},
        "top_p": 0.5,
    },
    "with a logits processor": {
        "allowed_token_ids": [A],
        "bad_words": ["a"],
        "typical_p": 0.5,
        "temperature": 1,
    },
}
LATER = {
    "a bad word of two tokens": {"allowed_token_ids": [Q], "bad_words": ["qq"]},
    "a processor takes what has come": {"allowed_token_ids": [A], "no_repeat_ngram_size": 1},
}
DRAWN = {"logit_bias", "top_p", "typical_p", "temperature", "no_repeat_ngram_size"}
"""Parameters that a beam search refuses."""
PATHS = {
    "/v1/completions": {"prompt": "Once"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}
FORMS = {
    "one": {},
    "n": {"n": 3, "temperature": 1},
    "best of": {"n": 2, "best_of": 4},
    "beams": {"n": 2, "use_beam_search": True},
}
GOOD = {"prompt": "Once upon a time", "max_tokens": 6, "temperature": 0, "logprobs": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(
        VllmConfig.make(
            model="tiny", device="cpu", dtype="float32", max_num_seqs=8, engine_process=False
        )
    )
    assert [
        engine.renderer.render_prompt(text, add_special_tokens=False).token_ids
        for text in ("a", "b", "qq")
    ] == [[A], [B], [Q, Q]]
    assert engine.renderer.eos_token_ids == [EOS]
    yield engine
    engine.close()


@functools.cache
def app_of(engine: AsyncLLM) -> FastAPI:
    """One app for all tests: it takes as long to make as a test's requests."""
    return create_app(engine)


def ask(engine: AsyncLLM, *requests: tuple[str, dict]) -> list[httpx.Response]:
    """The answers to requests of one moment."""

    async def all_of_them() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(engine)), base_url="http://test"
        ) as client:
            return await asyncio.gather(
                *(client.post(path, json=body, timeout=60) for path, body in requests)
            )

    return asyncio.run(all_of_them())


def refused(engine: AsyncLLM, body: dict, path: str = "/v1/completions") -> httpx.Response:
    """The answer to a request beside a good one, which is not touched by it."""
    [alone] = ask(engine, ("/v1/completions", GOOD))
    [answer, beside] = ask(engine, (path, body), ("/v1/completions", GOOD))
    assert beside.status_code == 200 and beside.json()["choices"] == alone.json()["choices"]
    return answer


def check(error: dict, given: dict) -> None:
    assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_left")
    for name in given.keys() & {
        "allowed_token_ids",
        "bad_words",
        "min_tokens",
        "typical_p",
        "no_repeat_ngram_size",
    }:
        assert name in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("given", [*AT_ONCE.values(), *LATER.values()], ids=[*AT_ONCE, *LATER])
def test_it_is_400(engine, path, form, given):
    answer = refused(
        engine, {"temperature": 0, "max_tokens": 3, **PATHS[path], **FORMS[form], **given}, path
    )
    assert answer.status_code == 400, answer.text
    if form == "beams" and given.keys() & DRAWN:
        assert answer.json()["error"]["param"] in DRAWN
    else:
        check(answer.json()["error"], given)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["one", "n"])
@pytest.mark.parametrize("given", AT_ONCE.values(), ids=AT_ONCE)
def test_a_stream_does_not_begin(engine, path, form, given):
    answer = refused(
        engine,
        {"temperature": 0, "max_tokens": 3, "stream": True, **PATHS[path], **FORMS[form], **given},
        path,
    )
    assert answer.status_code == 400, answer.text
    check(answer.json()["error"], given)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("form", ["one", "n"])
@pytest.mark.parametrize("given", LATER.values(), ids=LATER)
def test_a_stream_that_has_begun_ends_with_the_error(engine, path, form, given):
    """Whether it has begun is a matter of time."""
    body = {
        "temperature": 0,
        "max_tokens": 3,
        "stream": True,
        **PATHS[path],
        **FORMS[form],
        **given,
    }
    answer = refused(engine, body, path)
    last = answer.text
    if answer.status_code == 200:
        *_, last, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert done == "[DONE]"
    check(json.loads(last)["error"], given)


def test_several_prompts_share_the_error(engine):
    for stream in (False, True):
        answer = refused(
            engine,
            {**AT_ONCE["the allowed token is a bad word"], "prompt": ["a", "b"], "stream": stream},
        )
        check(answer.json()["error"], {"bad_words": ["a"]})


@pytest.mark.parametrize("text", ["-Infinity", "-1e999", "-101", "NaN"])
def test_a_bias_rules_nothing_out(engine, text):
    """Its bounds keep a token possible."""
    [least] = ask(
        engine,
        (
            "/v1/completions",
            {
                "prompt": "a",
                "max_tokens": 2,
                "allowed_token_ids": [A],
                "logit_bias": {f"{A}": -100},
            },
        ),
    )
    assert least.status_code == 200 and least.json()["choices"][0]["text"] == "aa"

    async def send() -> httpx.Response:
        content = f'{{"prompt": "a", "logit_bias": {{"{A}": {text}}}}}'
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app_of(engine)), base_url="http://test"
        ) as client:
            return await client.post(
                "/v1/completions", content=content, headers={"content-type": "application/json"}
            )

    assert asyncio.run(send()).status_code == 400


BECOMES = "(" + "|".join("a" * i for i in range(1, 100)) + "){1,100}"
"""Its tokens take ever more steps of the lexer."""


@pytest.mark.parametrize(
    ("regex", "code"),
    [(BECOMES, "too_complex"), ("([a-z]{1,50}){1,500}", None)],
    ids=["later", "at once"],
)
def test_a_structure_that_is_too_complex_is_400(
    engine: AsyncLLM, regex: str, code: str | None
) -> None:
    body = {
        "prompt": "a",
        "structured_outputs": {"regex": regex},
        "temperature": 0,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    answer = refused(engine, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert "more than 200,000 steps" in error["message"] and "plugin" not in error["message"]
