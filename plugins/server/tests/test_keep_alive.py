"""Streams that have nothing to send yet send comments, so that nothing in between takes them for
dead."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import httpx
import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.caller import CALLER, Caller
from toolkit_lm_server.event_stream import EventStream, JsonLines
from toolkit_lm_server.limits.connections import HttpServer
from toolkit_lm_server.listening import bind
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
BODIES = {
    "/v1/completions": {"prompt": "abc", "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "stream": True},
    "/v1/responses": {"input": "abc", "stream": True},
}
LAST = {"/v1/responses": "response.completed"}
"""The type of the last event, of streams that have no [DONE]."""
COMMENT = ": keep-alive"


@pytest.fixture
def slow(make_engine):
    """An engine that gives its first output when it is `let`."""

    class Slow(make_engine):
        def __init__(self) -> None:
            super().__init__()
            self.let = asyncio.Event()
            self.waits = 0

        async def generate_many(self, prompts, params, **options):
            self.waits += 1
            try:
                await self.let.wait()
            finally:
                self.waits -= 1
            async for found in super().generate_many(prompts, params, **options):
                yield found

    return Slow()


@asynccontextmanager
async def served(engine, **options):
    """A client of a server in this event loop."""
    made = ServerOptions(log_level="critical", access_log=False, **options)
    with bind("127.0.0.1", 0) as listener:
        server = HttpServer(create_app(engine, made), made)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        async with httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=20
        ) as client:
            yield client
        server.should_exit = True
        await running


@pytest.mark.parametrize("path", BODIES)
async def test_comments_come_until_the_first_token(slow, path):
    async with (
        served(slow, sse_keep_alive=1) as client,
        client.stream("POST", path, json=BODIES[path]) as answer,
    ):
        assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (
            200,
            "text/event-stream",
        )
        lines = answer.aiter_lines()
        assert await anext(lines) == COMMENT
        slow.let.set()
        rest = [line async for line in lines if line.startswith("data: ")]
    assert len(rest) > 3
    if path in LAST:
        assert json.loads(rest[-1].removeprefix("data: "))["type"] == LAST[path]
        return
    assert rest[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["choices"] for line in rest[:-1])


async def test_a_response_that_is_refused_after_that_has_its_own_event(slow):
    async with served(slow, sse_keep_alive=1) as client:
        async with client.stream(
            "POST", "/v1/responses", json={"input": "refuse", "stream": True}
        ) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == COMMENT
            slow.let.set()
            name, data = [line async for line in lines if line and line != COMMENT]
        told = {
            "code": "invalid_prompt",
            "message": "n is too high",
            "param": "n",
            "sequence_number": 0,
        }
        assert (name, json.loads(data.removeprefix("data: "))) == (
            "event: error",
            {"type": "error", **told},
        )


async def test_an_error_after_that_is_an_event(slow):
    async with served(slow, sse_keep_alive=1) as client:
        body = {**BODIES["/v1/completions"], "prompt": "refuse"}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == COMMENT
            slow.let.set()
            error, done = [line async for line in lines if line and line != COMMENT]
        assert (json.loads(error.removeprefix("data: "))["error"]["param"], done) == (
            "n",
            "data: [DONE]",
        )
        assert (await client.post("/v1/completions", json=body)).status_code == 400


@pytest.mark.parametrize("seconds", [1, None])
async def test_a_client_that_leaves_before_the_first_token_ends_its_request(slow, seconds):
    async with served(slow, sse_keep_alive=seconds) as client:

        async def ask():
            async with client.stream(
                "POST", "/v1/completions", json=BODIES["/v1/completions"]
            ) as answer:
                assert await anext(answer.aiter_lines()) == COMMENT

        task = asyncio.create_task(ask())
        async with asyncio.timeout(10):
            while not slow.waits:
                await asyncio.sleep(0.01)
            if seconds:
                await task
            else:
                task.cancel()
            while slow.waits:
                await asyncio.sleep(0.01)


async def test_without_the_option_nothing_comes(slow):
    async with served(slow, sse_keep_alive=None) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=BODIES["/v1/completions"]))
        await asyncio.sleep(1.2)
        slow.let.set()
        assert COMMENT not in (await asked).text


class Source:
    async def aclose(self) -> None:
        pass


async def sent(kind, gaps) -> bytes:
    """The body of a stream with an event after each of these seconds."""

    async def events():
        for number, seconds in enumerate(gaps):
            await asyncio.sleep(seconds)
            yield [{"number": number}]
        raise RequestError("no more", "n")

    body = b""

    async def send(message):
        nonlocal body
        body += message.get("body", b"")

    token = CALLER.set(Caller(keep_alive=0.1))
    try:
        await kind(events(), Source())({}, asyncio.Event().wait, send)
    finally:
        CALLER.reset(token)
    return body


async def test_comments_stand_between_events():
    start = time.monotonic()
    body = await sent(EventStream, [0, 0.35, 0])
    most = (time.monotonic() - start) / 0.1
    first = body.index(b'{"number":0}')
    second = body.index(b'{"number":1}')
    assert body.startswith(b"data: ") and 1 <= body[first:second].count(b": keep-alive\n\n") <= most
    assert (
        b"keep-alive" not in body[second:]
        and body.endswith(b"data: [DONE]\n\n")
        and b"no more" in body
    )


async def test_lines_of_json_have_no_comments():
    body = await sent(JsonLines, [0, 0.35])
    assert [list(json.loads(line)) for line in body.splitlines()] == [
        ["number"],
        ["number"],
        ["error"],
    ]
