"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import json
import re

import pytest
from toolkit_lm.renderer import Rendered
from toolkit_lm_vendor_apis.anthropic.body import MessagesBody
from toolkit_lm_vendor_apis.anthropic.output import Output

pytestmark = pytest.mark.anyio

ASK = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0.0,
    "max_tokens": 20,
}
PARIS = "The capital of France is Paris."


def events_of(response) -> list[dict]:
    frames = [frame.split("\n") for frame in response.text.rstrip("\n").split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [name for name, _ in frames] == [f"event: {event['type']}" for event in found]
    return found


async def test_a_message(serve):
    async with serve() as client:
        message = (await client.post("/v1/messages", json={**ASK, "model": "small"})).json()
        assert (message["type"], message["role"], message["model"]) == (
            "message",
            "assistant",
            "small",
        )
        assert message["content"] == [{"type": "text", "text": PARIS}]
        assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
        used = message["usage"]
        counted = (
            await client.post("/v1/messages/count_tokens", json={"messages": ASK["messages"]})
        ).json()
        assert used["input_tokens"] + used["cache_read_input_tokens"] == counted["input_tokens"]
        cut = (await client.post("/v1/messages", json={**ASK, "max_tokens": 2})).json()
        assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 2)
        stopped = (
            await client.post("/v1/messages", json={**ASK, "stop_sequences": [" is"]})
        ).json()
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " is")
        assert stopped["content"][0]["text"] == "The capital of France"


async def test_tools_are_counted(serve, engines, monkeypatch):
    """Tools are counted as the prompt tells of them; this model's template does not."""
    seen = []
    renderer = engines["generate"].renderer
    monkeypatch.setattr(
        renderer,
        "render_conversation",
        lambda messages, **_: seen.append(messages) or Rendered([1, 2, 3]),
    )
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    async with serve() as client:
        counted = await client.post(
            "/v1/messages/count_tokens", json={"messages": ASK["messages"], "tools": tools}
        )
    assert counted.json() == {"input_tokens": 3}
    assert '{"name": "f"' in str(seen[0][0]["content"])


async def test_a_stream(serve):
    async with serve() as client:
        events = events_of(await client.post("/v1/messages", json={**ASK, "stream": True}))
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert "".join(event["delta"]["text"] for event in events[2:-3]) == PARIS
        start = events[0]["message"]["usage"]
        end = events[-2]["usage"]
        assert (start["output_tokens"], start["input_tokens"]) == (0, end["input_tokens"]) and end[
            "output_tokens"
        ] > 0
        assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_a_final_message_of_the_assistant_goes_on(serve):
    async with serve() as client:
        body = {
            **ASK,
            "messages": [
                *ASK["messages"],
                {"role": "assistant", "content": [{"type": "text", "text": "The capital"}]},
            ],
        }
        assert (await client.post("/v1/messages", json=body)).json()["content"][0][
            "text"
        ] == " of France is Paris."


async def test_structured_output(serve):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    async with serve() as client:
        body = {
            **ASK,
            "max_tokens": 60,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        }
        text = (await client.post("/v1/messages", json=body)).json()["content"][0]["text"]
        assert list(json.loads(text)) == ["ok"]


def test_blocks_are_messages():
    body = MessagesBody(
        max_tokens=9,
        system=[
            {"type": "text", "text": "be"},
            {"type": "text", "text": "short", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {
                        "type": "image",
                        "source": {"type": "base64", "media_type": "image/gif", "data": "AAAA"},
                    },
                    {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "a cat"}],
                    },
                    {"type": "text", "text": "and?"},
                ],
            },
        ],
        tools=[
            {
                "name": "look",
                "description": "Looks.",
                "input_schema": {"type": "object"},
                "cache_control": {"type": "ephemeral"},
            }
        ],
        tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    fields = body.chat()
    assert fields["messages"] == [
        {"role": "system", "content": "be\nshort"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "see"},
                {"type": "image_url", "image_url": {"url": "data:image/gif;base64,AAAA"}},
                {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            ],
        },
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "t1",
                    "type": "function",
                    "function": {"name": "look", "arguments": '{"at": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "a cat"},
        {"role": "user", "content": "and?"},
    ]
    assert fields["tools"] == [
        {
            "type": "function",
            "function": {"name": "look", "parameters": {"type": "object"}, "description": "Looks."},
        }
    ]
    assert fields["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert (fields["parallel_tool_calls"], fields["chat_template_kwargs"]) == (
        False,
        {"enable_thinking": True},
    )


@pytest.mark.parametrize("thinks", [False, True])
async def test_reasoning_and_calls_are_blocks(said, thinks):
    """The whole message equals what the stream tells."""
    whole = Output(said(), "m", thinks=thinks).whole([])
    expected = [
        {"type": "text", "text": "I call"},
        {"type": "tool_use", "id": "call_a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "call_b", "name": "g", "input": {}},
    ]
    if thinks:
        expected.insert(0, {"type": "thinking", "thinking": "hm so", "signature": ""})
    assert (whole["content"], whole["stop_reason"]) == (expected, "tool_use")
    blocks: list[dict] = []
    async for events in Output(said(), "m", thinks=thinks).events():
        for event in events:
            if event["type"] == "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                name = {
                    "text_delta": "text",
                    "thinking_delta": "thinking",
                    "input_json_delta": "partial_json",
                }[delta["type"]]
                blocks[event["index"]]["json" if name == "partial_json" else name] += delta[name]
    told = [
        {**block, "input": json.loads(block["json"])} if block["type"] == "tool_use" else block
        for block in blocks
    ]
    assert [
        {name: value for name, value in block.items() if name != "json"} for block in told
    ] == expected


CACHED = {"cache_control": {"type": "ephemeral"}}
HOUR = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
TEXT = {"type": "text", "text": "a"}


def breakpoints(number, block=None):
    return [{**TEXT, **(block or CACHED)} for _ in range(number)]


@pytest.mark.parametrize(
    "fields, time",
    [
        ({}, None),
        (CACHED, "5m"),
        (HOUR, "1h"),
        ({"system": breakpoints(1)}, "5m"),
        ({"system": breakpoints(1, HOUR), **CACHED}, "1h"),
        ({"messages": [{"role": "user", "content": breakpoints(4)}]}, "5m"),
        ({"tools": [{"name": "f", "input_schema": {"type": "object"}, **HOUR}]}, "1h"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "tool_use_id": "a",
                                "content": breakpoints(1, HOUR),
                            }
                        ],
                    }
                ]
            },
            "1h",
        ),
    ],
)
def test_breakpoints_ask_to_retain_the_prompt(fields, time):
    asked = {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}], **fields}
    assert MessagesBody(**asked).chat().get("prompt_cache_retention") == time


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"system": breakpoints(3), **CACHED}, None),
        ({"system": breakpoints(4), **CACHED}, "at most 4 blocks may have it, and 5 do"),
        ({"cache_control": {"type": "forever"}}, "cache_control must be"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control must be"),
        ({"system": [{**TEXT, "cache_control": "yes"}]}, r"system\[0\].cache_control must be"),
    ],
)
async def test_wrong_breakpoints_are_named(serve, fields, words):
    async with serve() as client:
        answer = await client.post("/v1/messages", json={**ASK, **fields})
    assert answer.status_code == (400 if words else 200), answer.text
    if words:
        assert re.search(words, answer.json()["error"]["message"])
