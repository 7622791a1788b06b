"""A call that the token limit cuts can be executed at no door: it is left out, and the reason is
told, streamed or not, in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from families import WRITTEN
from malformed import form_of
from toolkit_lm.outputs import CompletionOutput, RequestOutput
from toolkit_lm.params import RequestOutputKind
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio

Calls = list[tuple[str, Any]]
"""Names and arguments, as JSON or the text of it."""
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
NAMES = ("get_weather", "get_time")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
QUICK = ("hermes", "qwen3_coder")
CALL_WORDS = {"tool_calls", "tool_use", "function_call"}


class Door(NamedTuple):
    """A route whose answers may have calls."""

    body: dict[str, Any]
    whole: Callable[[dict[str, Any]], tuple[Calls, Any]]
    """The calls of an answer, and its reason."""
    events: Callable[[list[dict[str, Any]]], tuple[Calls, Any]] | None
    """Calls in a stream's events; None: it has no streams."""
    reason: Any
    """Finish reason of a cut answer."""
    called: Any
    """Finish reason of an answer that ends with calls."""


def of_message(message: dict[str, Any]) -> Calls:
    return [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]


def chat(answer: dict[str, Any]) -> tuple[Calls, Any]:
    [choice] = answer["choices"]
    return of_message(choice["message"]), choice["finish_reason"]


def chat_events(events: list[dict[str, Any]]) -> tuple[Calls, Any]:
    calls: dict[int, list[str]] = {}
    reason = None
    for choice in (choice for event in events for choice in event["choices"]):
        for call in choice["delta"].get("tool_calls") or ():
            known = calls.setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name") or ""
            known[1] += call["function"].get("arguments") or ""
        reason = choice["finish_reason"] or reason
    return [(name, arguments) for name, arguments in calls.values()], reason


def response(answer: dict[str, Any]) -> tuple[Calls, Any]:
    calls = [
        (item["name"], item["arguments"])
        for item in answer["output"]
        if item["type"] == "function_call"
    ]
    return calls, (answer["incomplete_details"] or {}).get("reason")


def response_events(events: list[dict[str, Any]]) -> tuple[Calls, Any]:
    begun = [
        event
        for event in events
        if event["type"] == "response.output_item.added"
        and event["item"]["type"] == "function_call"
    ]
    found = response(events[-1]["response"])
    assert len(begun) == len(found[0])
    return found


def anthropic(answer: dict[str, Any]) -> tuple[Calls, Any]:
    return [
        (block["name"], block["input"])
        for block in answer["content"]
        if block["type"] == "tool_use"
    ], answer["stop_reason"]


def anthropic_events(events: list[dict[str, Any]]) -> tuple[Calls, Any]:
    calls: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls[event["index"]] = [event["content_block"]["name"], ""]
        if event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[event["index"]][1] += event["delta"]["partial_json"]
    [reason] = [
        event["delta"]["stop_reason"] for event in events if event["type"] == "message_delta"
    ]
    return [(name, arguments) for name, arguments in calls.values()], reason


def cohere(answer: dict[str, Any]) -> tuple[Calls, Any]:
    return of_message(answer["message"]), answer["finish_reason"]


def cohere_events(events: list[dict[str, Any]]) -> tuple[Calls, Any]:
    calls: dict[int, list[str]] = {}
    for event in events:
        if event["type"] == "tool-call-start":
            calls[event["index"]] = [
                event["delta"]["message"]["tool_calls"]["function"]["name"],
                "",
            ]
        if event["type"] == "tool-call-delta":
            calls[event["index"]][1] += event["delta"]["message"]["tool_calls"]["function"][
                "arguments"
            ]
    return [(name, arguments) for name, arguments in calls.values()], events[-1]["delta"][
        "finish_reason"
    ]


def ollama(answer: dict[str, Any]) -> tuple[Calls, Any]:
    return of_message(answer["message"]), answer["done_reason"]


def ollama_events(events: list[dict[str, Any]]) -> tuple[Calls, Any]:
    return [call for event in events for call in of_message(event["message"])], events[-1][
        "done_reason"
    ]


DOORS = {
    "/v1/chat/completions": Door(
        {"messages": MESSAGES, "tools": TOOLS}, chat, chat_events, "length", "tool_calls"
    ),
    "/v1/chat/completions/batch": Door(
        {"messages": [MESSAGES], "tools": TOOLS}, chat, None, "length", "tool_calls"
    ),
    "/v1/responses": Door(
        {
            "input": "hi",
            "tools": [{"type": "function", "name": name, "parameters": SCHEMA} for name in NAMES],
        },
        response,
        response_events,
        "max_output_tokens",
        None,
    ),
    "/v1/messages": Door(
        {
            "messages": MESSAGES,
            "max_tokens": 99,
            "tools": [{"name": name, "input_schema": SCHEMA} for name in NAMES],
        },
        anthropic,
        anthropic_events,
        "max_tokens",
        "tool_use",
    ),
    "/v2/chat": Door(
        {"messages": MESSAGES, "tools": TOOLS}, cohere, cohere_events, "MAX_TOKENS", "TOOL_CALL"
    ),
    "/api/chat": Door(
        {"messages": MESSAGES, "tools": TOOLS}, ollama, ollama_events, "length", "stop"
    ),
}


@pytest.fixture
def say(engines, monkeypatch):
    """say(text, reason): what the engine answers from then on, some characters at a time."""

    def say(text: str, reason: str) -> None:
        async def chat_many(conversations, params, *, options=None, **rendering):
            is_delta = params.output_kind is RequestOutputKind.DELTA
            for at in range(0, len(text), 7) if is_delta else [0]:
                part = text[at : at + 7] if is_delta else text
                done = at + len(part) == len(text)
                one = CompletionOutput(0, part, [1], finish_reason=reason if done else None)
                yield [(0, RequestOutput("id", None, [1], [one], done))]

        monkeypatch.setattr(engines["generate"], "chat_many", chat_many)

    return say


def words(value: Any, schemas: dict[str, Any], seen: set[str]) -> set[str]:
    """All texts in a part of an OpenAPI document, and in what it refers to."""
    if isinstance(value, str):
        return {value}
    if not isinstance(value, dict | list):
        return set()
    found: set[str] = set()
    if (
        isinstance(value, dict)
        and isinstance(reference := value.get("$ref"), str)
        and reference not in seen
    ):
        seen.add(reference)
        found |= words(schemas[reference.rpartition("/")[2]], schemas, seen)
    found |= set(value) if isinstance(value, dict) else set()
    return found.union(
        *(
            words(one, schemas, seen)
            for one in (value.values() if isinstance(value, dict) else value)
        )
    )


def test_every_door_and_every_format_is_tried(engines):
    told = create_app(engines["generate"], ServerOptions()).openapi()
    answers = {
        path: words(
            methods["post"]["responses"].get("200", {}), told["components"]["schemas"], set()
        )
        for path, methods in told["paths"].items()
        if "post" in methods
    }
    assert {path for path, found in answers.items() if found & CALL_WORDS} == set(DOORS)
    parsers = Plugins.load().parsers
    assert {name for name in parsers if "tool_calls" in parsers.load(name).finds} == {
        form_of(name) for name in WRITTEN
    }


def values(calls: Calls) -> Calls:
    """Arguments that are a text must be JSON."""
    return [(name, json.loads(given) if isinstance(given, str) else given) for name, given in calls]


MUST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"tool_choice": "required"},
    "/v1/chat/completions/batch": {"tool_choice": "required"},
    "/v1/responses": {"tool_choice": "required"},
    "/v1/messages": {"tool_choice": {"type": "any"}},
    "/v2/chat": {"tool_choice": "REQUIRED"},
}
"""Parameters that make an answer call a tool, by route."""
IN_PIECES = ("/v1/chat/completions",)
"""Routes on which a call streams while it is written."""


@pytest.mark.parametrize("path", [path for path in MUST if DOORS[path].events is not None])
async def test_a_call_that_must_be_is_not_executable_either_where_it_is_cut(serve, say, path):
    door = DOORS[path]
    written = WRITTEN["hermes"]
    async with serve(tool_call_parser="hermes") as client:
        for end in (len(written.begin) + 30, len(written.oslo) - len(written.end)):
            say(written.oslo[:end], "length")
            streamed = (
                await client.post(path, json={**door.body, **MUST[path], "stream": True})
            ).text
            lines = [line.removeprefix("data: ") for line in streamed.splitlines()]
            calls, reason = door.events(
                [json.loads(line) for line in lines if line.startswith("{")]
            )
            assert reason == door.reason and bool(calls) == (path in IN_PIECES)
            for name, arguments in calls:
                assert (
                    name == "get_time"
                    and arguments.startswith('{"c')
                    and not arguments.endswith("}")
                )


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRITTEN],
)
async def test_a_cut_call_is_executable_at_no_door(serve, say, name, path):
    door = DOORS[path]
    written = WRITTEN[name]
    begins = len(written.begin)
    most = len(written.oslo) - len(written.end)
    first = [("get_weather", {"city": "Paris"})]
    async with serve(tool_call_parser=form_of(name)) as client:

        async def ask(text: str, reason: str) -> tuple[Calls, Any]:
            say(text, reason)
            answer = await client.post(path, json={**door.body, "stream": False})
            assert answer.status_code == 200, answer.text
            found = door.whole(answer.json())
            if door.events is not None:
                streamed = (await client.post(path, json={**door.body, "stream": True})).text
                lines = [line.removeprefix("data: ") for line in streamed.splitlines()]
                calls, why = door.events(
                    [json.loads(line) for line in lines if line.startswith("{")]
                )
                assert (values(calls), why) == (values(found[0]), found[1])
            return values(found[0]), found[1]

        for end in {begins + 2, begins + 9, most - 8, most - 2}:
            assert await ask(written.oslo[:end], "length") == ([], door.reason)
        assert await ask(f"{written.paris}\n{written.oslo[: most - 2]}", "length") == (
            first,
            door.reason,
        )
        second = ("get_time", {"city": "Oslo", "days": 3})
        assert await ask(f"{written.paris}\n{written.oslo}", "stop") == (
            [*first, second],
            door.called,
        )
