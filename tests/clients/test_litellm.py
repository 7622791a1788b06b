"""litellm: chats, streams, tools, responses and embeddings by OpenAI's API; chats by Anthropic's
and Ollama's; async."""

from __future__ import annotations

import asyncio
import json

import litellm
import pytest

ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "light", "description": "Switches a light.", "parameters": SCHEMA},
}


@pytest.fixture(params=["openai/tiny", "anthropic/tiny", "ollama_chat/tiny", "hosted_vllm/tiny"])
def model(request, url, key):
    base = url if request.param.startswith(("anthropic", "ollama")) else f"{url}/v1"
    return {"model": request.param, "api_base": base, "api_key": key}


def test_chat(model):
    assert (
        litellm.completion(**model, messages=ASK, temperature=0, max_tokens=20)
        .choices[0]
        .message.content
        == PARIS
    )
    chunks = litellm.completion(**model, messages=ASK, temperature=0, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert (
        asyncio.run(litellm.acompletion(**model, messages=ASK, temperature=0, max_tokens=20))
        .choices[0]
        .message.content
        == PARIS
    )


def test_tools(url, key):
    how = {
        "model": "openai/tiny",
        "api_base": f"{url}/v1",
        "api_key": key,
        "tools": [TOOL],
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 100,
        "parallel_tool_calls": False,
    }
    [call] = litellm.completion(**how, messages=ASK).choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["on"]


def test_responses(url, key):
    reply = litellm.responses(
        model="openai/tiny",
        api_base=f"{url}/v1",
        api_key=key,
        input=ASK[0]["content"],
        temperature=0,
    )
    assert reply.output[0].content[0].text == PARIS


def test_embeddings(embed_url, key):
    reply = litellm.embedding(
        model="openai/tiny", api_base=f"{embed_url}/v1", api_key=key, input=["one", "two"]
    )
    assert len(reply.data) == 2
