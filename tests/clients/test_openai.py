"""openai: chats, completions, streams, `parse` of chats and responses, tools, responses with their
events, conversations, embeddings, errors, async."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import Literal

import openai
import page
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

ASK = [{"role": "user", "content": "What is the capital of France?"}]
PARIS = "The capital of France is Paris."


class Light(BaseModel):
    colour: Literal["red", "green"]
    on: bool


TOOL = {
    "type": "function",
    "function": {
        "name": "light",
        "description": "Switches a light.",
        "parameters": Light.model_json_schema() | {"additionalProperties": False},
    },
}


@pytest.fixture
def client(url, key):
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as one:
        yield one


def test_it_is_the_version_that_the_page_tells():
    assert {name: version(name) for name in page.versions()} == page.versions()


def test_chat(client):
    reply = client.chat.completions.create(
        model="tiny", messages=ASK, temperature=0, n=2, logprobs=True, top_logprobs=2
    )
    assert [choice.message.content for choice in reply.choices] == [PARIS, PARIS]
    assert (
        reply.usage.completion_tokens == 2 * 11
        and len(reply.choices[0].logprobs.content[0].top_logprobs) == 2
    )
    with client.chat.completions.create(
        model="tiny",
        messages=ASK,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        *chunks, last = stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == PARIS
    assert (chunks[-1].choices[0].finish_reason, last.usage.completion_tokens) == ("stop", 11)
    with client.chat.completions.stream(model="tiny", messages=ASK, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content == PARIS


def test_completions_and_models(client):
    reply = client.completions.create(
        model="tiny",
        prompt=["Once upon a time", "One day"],
        max_tokens=4,
        temperature=0,
        logprobs=1,
    )
    assert len(reply.choices) == 2 and len(reply.choices[0].logprobs.tokens) == 4
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_parse(client):
    reply = client.chat.completions.parse(
        model="tiny", messages=ASK, response_format=Light, max_tokens=200, temperature=0
    )
    assert isinstance(reply.choices[0].message.parsed, Light)
    response = client.responses.parse(
        model="tiny", input="A light?", text_format=Light, max_output_tokens=200, temperature=0
    )
    assert isinstance(response.output_parsed, Light)


def test_tools(client):
    for choice in ("required", {"type": "function", "function": {"name": "light"}}):
        reply = client.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=[TOOL],
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=200,
            temperature=0,
        )
        [call] = reply.choices[0].message.tool_calls
        assert call.function.name == "light" and Light.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(
        model="tiny",
        messages=ASK,
        tools=[TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        temperature=0,
    ) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert Light.model_validate_json(call.function.arguments)
    conversation = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call.model_dump(include={"id", "type", "function"})],
        },
    ]
    conversation.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    assert (
        client.chat.completions.create(model="tiny", messages=conversation, max_tokens=4)
        .choices[0]
        .message
    )


def test_responses(client):
    response = client.responses.create(
        model="tiny", input=ASK[0]["content"], temperature=0, metadata={"a": "b"}
    )
    assert (response.output_text, response.status, response.metadata) == (
        PARIS,
        "completed",
        {"a": "b"},
    )
    assert response.usage.output_tokens == 11
    cut = client.responses.create(model="tiny", input=ASK, temperature=0, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    with client.responses.stream(model="tiny", input=ASK, temperature=0) as stream:
        events = [*stream]
        assert stream.get_final_response().output_text == PARIS
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta")
        == PARIS
    )
    with pytest.raises(openai.BadRequestError, match="keeps no responses"):
        client.responses.create(model="tiny", input="hi", previous_response_id=response.id)


def test_conversations(keeping_url, key):
    with OpenAI(base_url=f"{keeping_url}/v1", api_key=key, max_retries=0) as client:
        made = client.conversations.create(metadata={"a": "b"}, items=[])
        asked = {"model": "tiny", "conversation": made.id, "temperature": 0}
        response = client.responses.create(input=ASK, **asked)
        assert (response.output_text, response.conversation.id) == (PARIS, made.id)
        with client.responses.stream(input="And of Italy?", **asked) as stream:
            assert stream.get_final_response().status == "completed"
        items = client.conversations.items.list(made.id, order="asc", limit=2)
        assert [one.role for one in items] == ["user", "assistant", "user", "assistant"]
        [first, second, *_] = items.data
        assert (first.content[0].text, second.content[0].text) == (ASK[0]["content"], PARIS)
        assert client.conversations.items.retrieve(first.id, conversation_id=made.id) == first
        told = [{"role": "user", "content": "So."}]
        [added] = client.conversations.items.create(made.id, items=told).data
        kept = client.conversations.items.delete(added.id, conversation_id=made.id)
        assert (kept.id, kept.metadata) == (made.id, {"a": "b"})
        assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
        assert client.conversations.retrieve(made.id).metadata == {"c": "d"}
        assert client.conversations.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.responses.create(input="hi", **asked)


def test_stored_chats(keeping_url, key):
    with OpenAI(base_url=f"{keeping_url}/v1", api_key=key, max_retries=0) as client:
        asked = {"model": "tiny", "messages": ASK, "temperature": 0, "store": True}
        made = client.chat.completions.create(**asked, metadata={"a": "b"})
        [kept] = client.chat.completions.list(metadata={"a": "b"})
        assert kept == client.chat.completions.retrieve(made.id)
        assert (kept.choices[0].message.content, kept.metadata) == (PARIS, {"a": "b"})
        [message] = client.chat.completions.messages.list(made.id)
        assert message.content == ASK[0]["content"]
        changed = client.chat.completions.update(made.id, metadata={"c": "d"})
        assert changed.metadata == {"c": "d"}
        assert client.chat.completions.delete(made.id).deleted
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.chat.completions.retrieve(made.id)


def test_tools_of_responses(client):
    tool = {"type": "function", **TOOL["function"], "strict": True}
    response = client.responses.create(
        model="tiny",
        input=ASK,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        temperature=0,
    )
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "light" and Light.model_validate_json(call.arguments)
    with client.responses.stream(
        model="tiny",
        input=ASK,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=200,
        temperature=0,
    ) as stream:
        done = [event for event in stream if event.type == "response.function_call_arguments.done"]
    assert Light.model_validate_json(done[0].arguments)
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    assert client.responses.create(
        model="tiny", input=[*ASK, *response.output, told], max_output_tokens=4
    ).id


def test_embeddings(embed_url, key):
    with OpenAI(base_url=f"{embed_url}/v1", api_key=key) as client:
        reply = client.embeddings.create(model="tiny", input=["one", "two"], dimensions=128)
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model="tiny", input="one", dimensions=16)
    assert [len(one.embedding) for one in reply.data] == [128, 128]


def test_errors(client, url):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=ASK, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=ASK)
    with (
        OpenAI(base_url=f"{url}/v1", api_key="wrong") as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_async(url, key):
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key=key) as client:
            chats = [
                client.chat.completions.create(model="tiny", messages=ASK, temperature=0)
                for _ in range(4)
            ]
            texts = [reply.choices[0].message.content for reply in await asyncio.gather(*chats)]
            async with client.responses.stream(model="tiny", input=ASK, temperature=0) as stream:
                texts.append((await stream.get_final_response()).output_text)
        return texts

    assert asyncio.run(run()) == [PARIS] * 5
