"""anthropic: messages, streams, tools, token counts, prefilled answers, structured output, errors,
async."""

from __future__ import annotations

import asyncio

import anthropic
import pytest
from anthropic import Anthropic, AsyncAnthropic

ASK = [{"role": "user", "content": "What is the capital of France?"}]
COLD = {"temperature": 0}
"""This version of the client has no argument for it."""
ALONE = {"disable_parallel_tool_use": True}
PARIS = "The capital of France is Paris."
TOOL = {
    "name": "light",
    "description": "Switches a light.",
    "input_schema": {
        "type": "object",
        "properties": {"on": {"type": "boolean"}},
        "required": ["on"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(url, key):
    with Anthropic(base_url=url, api_key=key, max_retries=0) as one:
        yield one


def test_messages(client):
    message = client.messages.create(
        model="tiny",
        max_tokens=20,
        extra_body=COLD,
        messages=ASK,
        system="Be short.",
        stop_sequences=["!"],
    )
    assert (message.content[0].type, message.role, message.stop_reason) == (
        "text",
        "assistant",
        "end_turn",
    )
    message = client.messages.create(model="tiny", max_tokens=20, extra_body=COLD, messages=ASK)
    assert message.content[0].text == PARIS and message.usage.output_tokens == 11
    prefilled = [*ASK, {"role": "assistant", "content": "The capital"}]
    message = client.messages.create(
        model="tiny", max_tokens=20, extra_body=COLD, messages=prefilled
    )
    assert message.content[0].text == " of France is Paris."
    assert client.messages.count_tokens(model="tiny", messages=ASK).input_tokens == 17


def test_streams(client):
    with client.messages.stream(
        model="tiny", max_tokens=20, extra_body=COLD, messages=ASK
    ) as stream:
        assert "".join(stream.text_stream) == PARIS
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason, final.usage.output_tokens) == (
        PARIS,
        "end_turn",
        11,
    )
    events = client.messages.create(model="tiny", max_tokens=2, messages=ASK, stream=True)
    assert [event.type for event in events][-1] == "message_stop"


def test_tools(client):
    for choice in ({"type": "any", **ALONE}, {"type": "tool", "name": "light", **ALONE}):
        message = client.messages.create(
            model="tiny",
            max_tokens=200,
            extra_body=COLD,
            messages=ASK,
            tools=[TOOL],
            tool_choice=choice,
        )
        [call] = [block for block in message.content if block.type == "tool_use"]
        assert (call.name, list(call.input), message.stop_reason) == ("light", ["on"], "tool_use")
    with client.messages.stream(
        model="tiny",
        max_tokens=200,
        extra_body=COLD,
        messages=ASK,
        tools=[TOOL],
        tool_choice={"type": "any", **ALONE},
    ) as stream:
        [streamed] = [
            block for block in stream.get_final_message().content if block.type == "tool_use"
        ]
    assert list(streamed.input) == ["on"]
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}],
    }
    conversation = [*ASK, {"role": "assistant", "content": message.content}, result]
    assert client.messages.create(
        model="tiny", max_tokens=4, messages=conversation, tools=[TOOL]
    ).id


def test_structured_output(client):
    form = {"type": "json_schema", "schema": TOOL["input_schema"]}
    message = client.messages.create(
        model="tiny", max_tokens=200, extra_body=COLD, messages=ASK, output_config={"format": form}
    )
    assert '"on"' in message.content[0].text


def test_errors(client, url):
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model="tiny", max_tokens=0, messages=ASK)
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        client.messages.create(model="claude", max_tokens=4, messages=ASK)
    with (
        Anthropic(base_url=url, api_key="wrong") as other,
        pytest.raises(anthropic.AuthenticationError),
    ):
        other.messages.create(model="tiny", max_tokens=4, messages=ASK)


def test_async(url, key):
    async def run() -> list[str]:
        async with AsyncAnthropic(base_url=url, api_key=key) as client:
            asked = [
                client.messages.create(model="tiny", max_tokens=20, extra_body=COLD, messages=ASK)
                for _ in range(3)
            ]
            texts = [message.content[0].text for message in await asyncio.gather(*asked)]
            async with client.messages.stream(
                model="tiny", max_tokens=20, extra_body=COLD, messages=ASK
            ) as stream:
                texts.append("".join([text async for text in stream.text_stream]))
        return texts

    assert asyncio.run(run()) == [PARIS] * 4
