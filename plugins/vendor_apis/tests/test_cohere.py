"""POST /v2/chat."""

from __future__ import annotations

import json

import pytest
from toolkit_lm_vendor_apis.cohere.body import CohereChatBody
from toolkit_lm_vendor_apis.cohere.output import Output

pytestmark = pytest.mark.anyio

ASK = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0.0,
    "k": 0,
}
PARIS = "The capital of France is Paris."


async def test_a_chat(serve):
    async with serve() as client:
        reply = (
            await client.post("/v2/chat", json={**ASK, "model": "tiny", "logprobs": True})
        ).json()
        assert reply["message"] == {
            "role": "assistant",
            "content": [{"type": "text", "text": PARIS}],
        }
        assert (reply["finish_reason"], reply["usage"]["tokens"]["input_tokens"]) == (
            "COMPLETE",
            17,
        )
        assert (
            "".join(one["text"] for one in reply["logprobs"])
            == PARIS + reply["logprobs"][-1]["text"]
        )
        assert (await client.post("/v2/chat", json={**ASK, "max_tokens": 2})).json()[
            "finish_reason"
        ] == "MAX_TOKENS"
        assert (await client.post("/v2/chat", json={**ASK, "stop_sequences": [" is"]})).json()[
            "finish_reason"
        ] == "STOP_SEQUENCE"
        refused = await client.post("/v2/chat", json={**ASK, "p": 7.0})
        assert refused.json()["message"].startswith("p must be")
        refused = await client.post("/v2/chat", json={**ASK, "documents": ["a"]})
        assert (
            refused.status_code == 400 and "documents is not supported" in refused.json()["message"]
        )


async def test_a_stream(serve):
    async with serve() as client:
        response = await client.post("/v2/chat", json={**ASK, "stream": True})
        events = [
            json.loads(frame.split("\ndata: ")[1])
            for frame in response.text.rstrip("\n").split("\n\n")
        ]
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message-start", "content-start"] and kinds[-2:] == [
            "content-end",
            "message-end",
        ]
        assert (
            "".join(event["delta"]["message"]["content"]["text"] for event in events[1:-2]) == PARIS
        )
        assert events[-1]["delta"]["finish_reason"] == "COMPLETE"


async def test_json(serve):
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    async with serve() as client:
        reply = (
            await client.post(
                "/v2/chat",
                json={**ASK, "response_format": {"type": "json_object", "schema": schema}},
            )
        ).json()
        assert list(json.loads(reply["message"]["content"][0]["text"])) == ["ok"]


async def test_reasoning_and_calls(said):
    whole = Output(said(), tells_logprobs=False).whole([])
    assert whole["message"]["content"] == [
        {"type": "thinking", "thinking": "hm so"},
        {"type": "text", "text": "I call"},
    ]
    calls = whole["message"]["tool_calls"]
    assert [(call["id"], call["function"]) for call in calls] == [
        ("call_a", {"name": "f", "arguments": '{"x": 1}'}),
        ("call_b", {"name": "g", "arguments": "{}"}),
    ]
    assert whole["finish_reason"] == "TOOL_CALL"
    events = [
        event async for events in Output(said(), tells_logprobs=False).events() for event in events
    ]
    for number, call in enumerate(calls, 2):
        own = [event for event in events if event.get("index") == number]
        assert [own[0]["type"], own[-1]["type"]] == ["tool-call-start", "tool-call-end"]
        assert own[0]["delta"]["message"]["tool_calls"]["id"] == call["id"]
        assert (
            "".join(
                event["delta"]["message"]["tool_calls"]["function"]["arguments"]
                for event in own[1:-1]
            )
            == call["function"]["arguments"]
        )


def test_fields_are_those_of_a_chat():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    fields = CohereChatBody(
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image_url", "image_url": {"url": "data:x"}},
                ],
            },
            {"role": "assistant", "tool_plan": "I call f.", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": "c",
                "content": [{"type": "document", "document": {"data": '{"n": 1}'}}],
            },
        ],
        k=3,
        p=0.5,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        tool_choice="REQUIRED",
        strict_tools=True,
    ).chat()
    assert fields["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {"url": "data:x"}},
            ],
        },
        {"role": "assistant", "tool_calls": [call], "content": "I call f."},
        {"role": "tool", "tool_call_id": "c", "content": '{"n": 1}'},
    ]
    assert (fields["top_k"], fields["top_p"], fields["tool_choice"]) == (3, 0.5, "required")
    assert fields["tools"] == [
        {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    ]
