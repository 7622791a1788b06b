"""Clients that leave in the middle of a stream: the engine's work ends, whichever API it was asked
by."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import pytest
from toolkit_lm import AsyncLLM, VllmConfig
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_server.app import create_app

STORY = {"messages": [{"role": "user", "content": "tell a long story"}]}
STREAMS = {
    "/v1/chat/completions": {**STORY, "max_tokens": 400, "stream": True},
    "/v1/completions": {"prompt": ["Once", "One day"], "n": 2, "max_tokens": 400, "stream": True},
    "/invocations": {"prompt": "Once", "max_tokens": 400, "stream": True},
    "/v1/responses": {"input": "tell a long story", "stream": True},
    "/v1/messages": {**STORY, "max_tokens": 400, "stream": True},
    "/v2/chat": {**STORY, "stream": True},
    "/api/chat": STORY,
    "/api/generate": {"prompt": "Once upon a time", "raw": True},
}


class Watch:
    """Counts requests that were aborted. Steps take a while, so that no answer is whole when its
    client leaves."""

    name = "watch"

    def __init__(self) -> None:
        self.ended: list[str] = []

    @hookimpl
    def toolkit_event(self, event) -> None:
        if isinstance(event, StepEvent):
            time.sleep(0.01)
        elif isinstance(event, RequestEvent) and event.kind in ("finished", "aborted"):
            self.ended.append(event.kind)


WATCH = Watch()


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    config = VllmConfig.make(
        model="tiny", device="cpu", dtype="float32", max_num_seqs=8, engine_process=False
    )
    engine = AsyncLLM(config, plugins=[WATCH])
    yield engine
    engine.close()


async def leave(app, path: str, body: dict) -> bool:
    """Asks, and leaves at the first part of the answer. Whether the answer had an end."""
    content = json.dumps(body).encode()
    left = asyncio.Event()
    whole = False
    asked = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict:
        if asked:
            return asked.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict) -> None:
        nonlocal whole
        if message["type"] == "http.response.start":
            assert message["status"] == 200
        else:
            left.set()
            whole = not message.get("more_body")

    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
    }
    scope |= {
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    await asyncio.wait_for(app({**scope, "asgi": {"version": "3.0"}}, receive, send), 60)
    return whole


@pytest.mark.parametrize("path", STREAMS)
def test_the_work_of_a_stream_ends_with_its_client(engine, path):
    WATCH.ended.clear()
    num_requests = len(STREAMS[path].get("prompt", "")) if path == "/v1/completions" else 1
    assert not asyncio.run(leave(create_app(engine), path, STREAMS[path]))
    deadline = time.monotonic() + 30
    while len(WATCH.ended) < num_requests and time.monotonic() < deadline:
        time.sleep(0.01)
    assert WATCH.ended == ["aborted"] * num_requests
