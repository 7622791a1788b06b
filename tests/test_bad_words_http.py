"""Over HTTP, with the embedded model: words that are ruled out, bytes of tokens, and prompts that
are only scored."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app

ASK = [{"role": "user", "content": "What is the capital of France?"}]
COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


@pytest.fixture(scope="module")
def ask():
    engine = AsyncLLM(
        VllmConfig.make(
            model="tiny", device="cpu", dtype="float32", max_num_seqs=8, engine_process=False
        )
    )

    def sent(path: str, body: dict) -> dict:
        async def send() -> dict:
            async with httpx.AsyncClient(
                transport=httpx.ASGITransport(create_app(engine)), base_url="http://test"
            ) as client:
                return (await client.post(path, json=body)).json()

        return asyncio.run(send())

    yield sent
    engine.close()


@pytest.mark.parametrize("word", ["Paris", " Paris", "capital", "France is"])
def test_a_word_is_ruled_out_in_the_middle_of_a_sentence(ask, word):
    free = ask(CHAT, {"messages": ASK, "temperature": 0, "max_tokens": 20})["choices"][0][
        "message"
    ]["content"]
    assert word.strip() in free
    for temperature in (0, 1.5):
        held = {
            "messages": ASK,
            "temperature": temperature,
            "seed": 1,
            "n": 1 if temperature == 0 else 6,
            "max_tokens": 20,
        }
        for choice in ask(CHAT, {**held, "bad_words": [word]})["choices"]:
            assert f" {word.strip()}" not in f" {choice['message']['content']}"


def test_bytes_of_part_of_a_character(ask):
    text = "\N{GRINNING FACE}"
    tokens = ask("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert len(tokens) > 1
    for names in (False, True):
        found = []
        for token in tokens:
            body = {
                "messages": ASK,
                "max_tokens": 1,
                "temperature": 0,
                "logprobs": True,
                "top_logprobs": 0,
                "allowed_token_ids": [token],
            }
            reply = ask(CHAT, {**body, "return_tokens_as_token_ids": names})
            found += reply["choices"][0]["logprobs"]["content"][0]["bytes"]
        assert bytes(found) == text.encode()


def test_bytes_of_part_of_a_character_in_responses(ask):
    [first, *_] = ask("/tokenize", {"prompt": "\N{GRINNING FACE}", "add_special_tokens": False})[
        "tokens"
    ]
    body = {
        "input": "hi",
        "max_output_tokens": 1,
        "temperature": 0,
        "include": ["message.output_text.logprobs"],
    }
    reply = ask(RESPONSES, {**body, "allowed_token_ids": [first]})
    assert reply["output"][0]["content"][0]["logprobs"][0]["bytes"] == [0xF0]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_echo_without_tokens(ask, logprobs):
    body = {
        "prompt": "Once upon a time",
        "echo": True,
        "max_tokens": 0,
        "logprobs": logprobs,
        "temperature": 0,
    }
    reply = ask(COMPLETE, body)
    [choice] = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Once upon a time", "length")
    assert reply["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert choice["logprobs"] is None and choice["prompt_logprobs"] is None
        return
    usual = ask(COMPLETE, {**body, "max_tokens": 1})["choices"][0]["logprobs"]
    for name, values in choice["logprobs"].items():
        assert len(values) == reply["usage"]["prompt_tokens"] and values == usual[name][:-1]
