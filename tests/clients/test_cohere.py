"""cohere: chats, streams, tools, structured output, embeddings of all types, rerank, the first
version's embeddings, errors, async."""

from __future__ import annotations

import asyncio
import json

import cohere
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


@pytest.fixture
def client(url, key):
    return cohere.ClientV2(api_key=key, base_url=url)


def test_chat(client):
    reply = client.chat(model="tiny", messages=ASK, temperature=0)
    assert (reply.message.content[0].text, reply.finish_reason) == (PARIS, "COMPLETE")
    assert reply.usage.tokens.output_tokens == 11
    form = {"type": "json_object", "schema": SCHEMA}
    assert list(
        json.loads(
            client.chat(model="tiny", messages=ASK, response_format=form, temperature=0)
            .message.content[0]
            .text
        )
    ) == ["on"]


def test_streams(client):
    events = [*client.chat_stream(model="tiny", messages=ASK, temperature=0)]
    assert (
        "".join(
            event.delta.message.content.text for event in events if event.type == "content-delta"
        )
        == PARIS
    )
    assert events[-1].type == "message-end" and events[-1].delta.finish_reason == "COMPLETE"


def test_tools(client):
    reply = client.chat(
        model="tiny",
        messages=ASK,
        tools=[TOOL],
        tool_choice="REQUIRED",
        max_tokens=100,
        temperature=0,
    )
    call = reply.message.tool_calls[0]
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("light", ["on"])
    conversation = [
        *ASK,
        reply.message,
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    assert client.chat(model="tiny", messages=conversation, max_tokens=4).id
    events = [
        *client.chat_stream(
            model="tiny",
            messages=ASK,
            tools=[TOOL],
            tool_choice="REQUIRED",
            max_tokens=100,
            temperature=0,
        )
    ]
    assert (
        next(event.type for event in events if event.type.startswith("tool-call"))
        == "tool-call-start"
    )


def test_embeddings(embed_url, key):
    client = cohere.ClientV2(api_key=key, base_url=embed_url)
    kinds = ["float", "int8", "uint8", "binary", "ubinary"]
    found = client.embed(
        model="tiny", texts=["one", "two"], input_type="search_query", embedding_types=kinds
    ).embeddings
    assert [len(getattr(found, name)) for name in ("float_", *kinds[1:])] == [2] * 5
    assert len(found.binary[0]) * 8 == len(found.float_[0])
    old = cohere.Client(api_key=key, base_url=embed_url)
    assert (
        old.embed(texts=["one", "two"], model="tiny", input_type="search_document").embeddings
        == found.float_
    )


def test_rerank(embed_url, key):
    client = cohere.ClientV2(api_key=key, base_url=embed_url)
    results = client.rerank(
        model="tiny", query="capital of France", documents=["a fish", "Paris", "two"], top_n=2
    ).results
    assert len(results) == 2 and results[0].relevance_score >= results[1].relevance_score


def test_errors(client, url):
    with pytest.raises(cohere.BadRequestError, match="p must be"):
        client.chat(model="tiny", messages=ASK, p=7)
    with pytest.raises(cohere.NotFoundError, match="does not exist"):
        client.chat(model="command", messages=ASK)
    with pytest.raises(cohere.UnauthorizedError):
        cohere.ClientV2(api_key="wrong", base_url=url).chat(model="tiny", messages=ASK)


def test_async(url, key):
    async def run() -> list[str]:
        async with cohere.AsyncClientV2(api_key=key, base_url=url) as client:
            replies = await asyncio.gather(
                *(client.chat(model="tiny", messages=ASK, temperature=0) for _ in range(3))
            )
        return [reply.message.content[0].text for reply in replies]

    assert asyncio.run(run()) == [PARIS] * 3
