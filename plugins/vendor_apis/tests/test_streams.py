"""Streams of all vendors: what comes before the first token, what is told of one that fails, and
where whole answers are made."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.request_log import REASON, RequestLog

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
BODIES = {
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 20, "temperature": 0.0, "stream": True},
    "/v2/chat": {"messages": MESSAGES, "max_tokens": 20, "temperature": 0.0, "stream": True},
    "/v1/responses": {
        "input": MESSAGES[0]["content"],
        "max_output_tokens": 20,
        "temperature": 0.0,
        "stream": True,
    },
}
LINES = {"/api/chat": {"messages": MESSAGES, "options": {"num_predict": 20, "temperature": 0}}}
BEAT = {
    "/v1/messages": 'event: ping\ndata: {"type": "ping"}',
    "/v2/chat": ": keep-alive",
    "/v1/responses": ": keep-alive",
}
LAST = {
    "/v1/messages": "message_stop",
    "/v2/chat": "message-end",
    "/v1/responses": "response.completed",
}
FIRST = {
    "/v1/messages": "message_start",
    "/v2/chat": "message-start",
    "/v1/responses": "response.created",
}


def frames(text: str, path: str) -> tuple[int, list[dict]]:
    """How many beats come first, and the events after them."""
    found = text.rstrip("\n").split("\n\n")
    num_beats = next(place for place, frame in enumerate(found) if frame != BEAT[path])
    return num_beats, [
        json.loads(frame.partition("data: ")[2])
        for frame in found[num_beats:]
        if frame != BEAT[path]
    ]


@pytest.fixture
def late(engines, monkeypatch):
    """late(error, seconds): the engine gives nothing for a while, then what it is asked for, or
    the error."""
    ask = engines["generate"].chat_many

    def late(error: Exception | None = None, seconds: float = 2.3) -> None:
        async def slow(*arguments, **options) -> AsyncIterator:
            await asyncio.sleep(seconds)
            if error is not None:
                raise error
            async for found in ask(*arguments, **options):
                yield found

        monkeypatch.setattr(engines["generate"], "chat_many", slow)

    return late


@pytest.mark.parametrize("path", BODIES)
async def test_something_comes_before_the_first_token(serve, late, path):
    late()
    async with serve(sse_keep_alive=1) as client:
        response = await client.post(path, json=BODIES[path])
    num_beats, events = frames(response.text, path)
    assert response.status_code == 200 and num_beats >= 1 and events[0]["type"] == FIRST[path]
    assert events[-1]["type"] == LAST[path]


@pytest.mark.parametrize("path", BODIES)
async def test_an_error_after_that_is_an_event_and_before_it_a_status(serve, late, path):
    error = RequestError("temperature is wrong", "temperature")
    late(error)
    async with serve(sse_keep_alive=1) as client:
        num_beats, events = frames((await client.post(path, json=BODIES[path])).text, path)
    [event] = events
    assert num_beats >= 1 and "temperature is wrong" in json.dumps(event)
    if path == "/v1/messages":
        assert event == {
            "type": "error",
            "error": {"type": "invalid_request_error", "message": "temperature is wrong"},
        }
    elif path == "/v2/chat":
        assert (event["type"], event["delta"]["finish_reason"]) == ("message-end", "ERROR")
    else:
        assert (event["type"], event["code"], event["param"]) == (
            "error",
            "invalid_prompt",
            "temperature",
        )
    late(error, 0)
    async with serve() as client:
        assert (await client.post(path, json=BODIES[path])).status_code == 400


@pytest.mark.parametrize("path", [*BODIES, *LINES])
async def test_a_stream_that_fails_has_a_reason_in_the_log(engines, monkeypatch, path):
    ask = engines["generate"].chat_many
    scopes = []

    async def failing(*arguments, **options) -> AsyncIterator:
        async for found in ask(*arguments, **options):
            yield found
            raise RuntimeError("the lamp is out")

    monkeypatch.setattr(engines["generate"], "chat_many", failing)
    app = RequestLog(create_app(engines["generate"], ServerOptions()), Metrics())

    async def seen(scope, receive, send):
        scopes.append(scope)
        await app(scope, receive, send)

    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(seen), base_url="http://test"
    ) as client:
        response = await client.post(path, json={**BODIES, **LINES}[path])
    assert (
        response.status_code == 200
        and response.text.count("The server failed on this request.") == 1
    )
    assert scopes[0][REASON] == "The server failed on this request."


@pytest.mark.parametrize("path", BODIES)
async def test_large_answers_are_made_off_the_event_loop(serve, monkeypatch, path):
    made = []
    whole = ChatAnswer.whole
    monkeypatch.setattr(
        ChatAnswer,
        "whole",
        lambda self, choices: made.append(threading.get_ident()) or whole(self, choices),
    )
    monkeypatch.setattr("toolkit_lm_server.generation._LARGE", 5)
    async with serve() as client:
        response = await client.post(path, json={**BODIES[path], "stream": False})
    assert "Paris" in response.text and len(made) == 1 and made[0] != threading.get_ident()
