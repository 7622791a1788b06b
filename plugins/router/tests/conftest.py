"""Stubs of backends, and a router in front of them, in the test's own event loop."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from toolkit_lm_router.cli import Running
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_server.listening import bind


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def event(choices: list[dict], **more: object) -> bytes:
    head = {"id": "x", "created": 1, "choices": choices, **more}
    return b"data: " + json.dumps(head).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class StubBackend:
    """A server whose answers the test states."""

    def __init__(self, models: tuple[str, ...] = ("m",), owner: str = "toolkit-lm") -> None:
        self.models = models
        self.owner = owner
        self.health = 200
        self.created = 1
        self.parents: dict[str, str] = {}
        """The models that adapters are of, by adapter."""
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self.parts: list[bytes | float] = [event([{"index": 0, "text": "a"}]), DONE]
        """What a stream has: bytes, and seconds to wait."""
        self.breaks = False
        """The stream ends without its end."""
        self.status = 200
        self.json: object = None
        """The answer beside streams; None: the number of bytes that came."""
        self.headers: dict[str, str] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_left = 0
        """Requests whose client has left."""

    async def start(self) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/{path:.*}", self._answer)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        await web.SockSite(self.runner, listener).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        cards = [
            {
                "id": model,
                "owned_by": self.owner,
                "created": self.created,
                "parent": self.parents.get(model),
            }
            for model in self.models
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append((request.path_qs, dict(request.headers), body))
        try:
            await self.gate.wait()
            if self.status != 200:
                return web.json_response(
                    {"error": {"message": "no"}}, status=self.status, headers=self.headers
                )
            if b'"stream":true' not in body:
                answer = {"got": len(body)} if self.json is None else self.json
                return web.json_response(answer, headers=self.headers)
            return await self._stream(request)
        except (asyncio.CancelledError, ConnectionError):
            self.num_left += 1
            raise

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.headers})
        await response.prepare(request)
        for part in self.parts:
            if isinstance(part, bytes):
                await response.write(part)
            else:
                await asyncio.sleep(part)
        if self.breaks:
            assert request.transport is not None
            request.transport.abort()
        return response


class Routed:
    """A running router, and a client of it."""

    def __init__(self, running: Running, url: str, client: aiohttp.ClientSession) -> None:
        self.running = running
        self.fleet = running.fleet
        self.url = url
        self.client = client

    async def until(self, state: str, backend: StubBackend) -> None:
        while self.fleet.backends[backend.url].state != state:
            await asyncio.sleep(0.01)

    async def post(
        self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body: object
    ) -> tuple[int, bytes]:
        async with self.client.post(
            self.url + path,
            data=io.BytesIO(json.dumps(body, separators=(",", ":")).encode()),
            headers={"Content-Type": "application/json", **(headers or {})},
        ) as answer:
            return answer.status, await answer.read()

    async def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        async with self.client.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.read()


@asynccontextmanager
async def routing(*backends: StubBackend, **options: Any) -> AsyncIterator[Routed]:
    """A router in front of the backends, when it knows them."""
    async with AsyncExitStack() as ending:
        for backend in backends:
            await backend.start()
            ending.push_async_callback(backend.stop)
        settings = {"health_interval": 0.05, "shutdown_timeout": 8, "queue_timeout": 8.0, **options}
        urls = [backend.url for backend in backends]
        made = RouterOptions(backend=urls, port=0, **settings)
        listener = bind("127.0.0.1", 0)
        running = Running(made, listener)
        serving = asyncio.create_task(running.serve())
        port = listener.getsockname()[1]
        try:
            async with aiohttp.ClientSession() as client:
                routed = Routed(running, f"http://127.0.0.1:{port}", client)
                for backend in backends:
                    if backend.health == 200:
                        await routed.until("ready", backend)
                yield routed
        finally:
            running.stop()
            with suppress(asyncio.CancelledError):
                await serving


@pytest.fixture
def make_routing():
    return routing


@pytest.fixture
def make_stub():
    return StubBackend
