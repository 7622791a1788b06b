"""The forms in which clients send the same conversation: what a template must be handed is not in
what a client wrote."""

from __future__ import annotations

import json

USER = {"role": "user", "content": "what about apples"}
AGAIN = {"role": "user", "content": "then pears"}
ANSWER = {"role": "assistant", "content": "they are ripe"}
ARGUMENTS = {"city": "Paris"}


def parts(*texts):
    return [{"type": "text", "text": text} for text in texts]


def called(arguments=json.dumps(ARGUMENTS), **more):
    """An answer that calls a tool."""
    return {
        "role": "assistant",
        **more,
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": arguments},
            }
        ],
    }


def result(content="warm today", **more):
    return {"role": "tool", "tool_call_id": "abcdefghi", "content": content, **more}


def around(call=None, got=None):
    return [USER, called(content=None) if call is None else call, result() if got is None else got]


def tool(**more):
    return {"type": "function", "function": {"name": "forecast", **more}}


SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "a town"}},
    "required": ["place"],
}
NO_ARGUMENTS = called(content=None)
del NO_ARGUMENTS["tool_calls"][0]["function"]["arguments"]
CHATS = {
    "a text": [USER],
    "one part": [{"role": "user", "content": parts("what about apples")}],
    "parts of one type": [{"role": "user", "content": parts("what about apples", "and pears")}],
    "an answer of parts": [USER, {"role": "assistant", "content": parts("they are ripe")}, AGAIN],
    "an answer of several parts": [
        USER,
        {"role": "assistant", "content": parts("they are", "ripe")},
        AGAIN,
    ],
    "system": [{"role": "system", "content": "be brief"}, USER],
    "system, of parts": [{"role": "system", "content": parts("be brief")}, USER],
    "system, of several parts": [
        {"role": "system", "content": parts("be brief", "stay calm")},
        USER,
    ],
    "developer": [{"role": "developer", "content": "be brief"}, USER],
    "system later": [USER, ANSWER, {"role": "system", "content": "be brief"}, AGAIN],
    "system and developer": [
        {"role": "system", "content": "be brief"},
        {"role": "developer", "content": "stay calm"},
        USER,
    ],
    "an answer": [USER, ANSWER, AGAIN],
    "an answer that is null": [USER, {"role": "assistant", "content": None}, AGAIN],
    "an answer without content": [USER, {"role": "assistant"}, AGAIN],
    "an answer that is empty": [USER, {"role": "assistant", "content": ""}, AGAIN],
    "tool_calls null": [USER, {**ANSWER, "tool_calls": None}, AGAIN],
    "tool_calls empty": [USER, {**ANSWER, "tool_calls": []}, AGAIN],
    "reasoning_content": [USER, {**ANSWER, "reasoning_content": "because of autumn"}, AGAIN],
    "reasoning": [USER, {**ANSWER, "reasoning": "because of autumn"}, AGAIN],
    "a call": around(),
    "a call, its content absent": around(called()),
    "a call, its content empty": around(called(content="")),
    "a call beside a text": around(called(content="let me glance")),
    "a call beside parts": around(called(content=parts("let me", "glance"))),
    "a call with a mapping": around(called(ARGUMENTS, content=None)),
    "a call with a mapping, its content empty": around(called(ARGUMENTS, content="")),
    "a call with empty arguments": around(called("", content=None)),
    "a call with null as arguments": around(called(None, content=None)),
    "a call without arguments": around(NO_ARGUMENTS),
    "a call that was cut": around(called('{"city": Par', content=None)),
    "a call after reasoning": around(called(content=None, reasoning_content="because of autumn")),
    "a result with a name": around(got=result(name="weather")),
    "a result of one part": around(got=result(parts("warm today"))),
    "a result of several parts": around(got=result(parts("warm today", "cold tomorrow"))),
    "a result that is empty": around(got=result("")),
    "a result that is null": around(got=result(None)),
    "an answer after a call": [*around(), ANSWER, AGAIN],
}
TOOLS = {
    "a tool": tool(description="looks", parameters=SCHEMA),
    "parameters absent": tool(description="looks"),
    "parameters null": tool(description="looks", parameters=None),
    "parameters empty": tool(description="looks", parameters={}),
    "parameters without properties": tool(description="looks", parameters={"type": "object"}),
    "description absent": tool(parameters=SCHEMA),
    "description null": tool(description=None, parameters=SCHEMA),
    "nothing but a name": tool(),
}
FORMS = {
    **{name: (chat, None) for name, chat in CHATS.items()},
    **{name: ([USER], [one]) for name, one in TOOLS.items()},
    "a tool and a call": (around(), [TOOLS["a tool"]]),
    "system and a tool": (
        [{"role": "system", "content": "be brief"}, USER],
        [TOOLS["parameters absent"]],
    ),
}
