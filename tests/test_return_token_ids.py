"""Token ids of prompts and outputs, on each route that has a place for them: those that the engine
read and drew."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

TALK = [{"role": "user", "content": "Hi"}]
OTHER = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def client():
    options = {"dtype": "float32", "max_model_len": 256, "engine_process": False}
    engine = AsyncLLM(VllmConfig.make(model="tiny", device="cpu", **options))
    yield TestClient(create_app(engine, ServerOptions(routes=("anthropic", "sglang", "llama_cpp"))))
    engine.close()


def posted(client, path, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompt_of(client, messages):
    tokens = posted(client, "/tokenize", messages=messages)["tokens"]
    assert isinstance(tokens, list)
    return tokens


def check_continues(client, prompt, tokens, count):
    """The tokens are what follows the prompt, as a completion of its token ids draws it."""
    [choice] = posted(client, "/v1/completions", prompt=prompt, max_tokens=count, **GREEDY)[
        "choices"
    ]
    assert choice["prompt_token_ids"] == prompt
    assert choice["token_ids"] == tokens
    assert len(tokens) == count


def test_a_chat(client):
    found = posted(client, "/v1/chat/completions", messages=TALK, max_tokens=4, **GREEDY)
    assert found["prompt_token_ids"] == prompt_of(client, TALK)
    [choice] = found["choices"]
    assert "prompt_token_ids" not in choice
    check_continues(client, found["prompt_token_ids"], choice["token_ids"], 4)


def test_chats_of_one_request(client):
    body = {"messages": [TALK, OTHER], "max_tokens": 4}
    found = posted(client, "/v1/chat/completions/batch", **body, **GREEDY)
    assert found["prompt_token_ids"] is None
    for choice, talk in zip(found["choices"], (TALK, OTHER), strict=True):
        assert choice["prompt_token_ids"] == prompt_of(client, talk)
        check_continues(client, choice["prompt_token_ids"], choice["token_ids"], 4)
    plain = posted(client, "/v1/chat/completions/batch", **body)
    assert all("prompt_token_ids" not in choice for choice in plain["choices"])


def test_a_message(client):
    body = {"messages": TALK, "max_tokens": 4, "temperature": 0}
    found = posted(client, "/v1/messages", **body, return_token_ids=True)
    assert found["prompt_token_ids"] == prompt_of(client, TALK)
    check_continues(client, found["prompt_token_ids"], found["token_ids"], 4)
    assert "token_ids" not in posted(client, "/v1/messages", **body)
    answer = client.post("/v1/messages", json={**body, "stream": True, "return_token_ids": True})
    assert answer.status_code == 400
    assert "only when stream is false" in answer.text


def test_generate_always_has_them(client):
    params = {"max_new_tokens": 4, "temperature": 0}
    prompt = prompt_of(client, TALK)
    found = posted(client, "/generate", input_ids=prompt, sampling_params=params)
    check_continues(client, prompt, found["output_ids"], 4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "Hi"}),
        ("/infill", {"input_prefix": "a"}),
        ("/completion", {"prompt": "a"}),
    ],
)
def test_other_routes_refuse(client, path, body):
    answer = client.post(path, json={**body, "return_token_ids": True})
    assert answer.status_code == 400
    assert "return_token_ids" in answer.text
