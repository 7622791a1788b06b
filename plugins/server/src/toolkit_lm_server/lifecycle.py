"""A server from its first connection to its end: it starts, serves, is drained."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit_lm_server.app import create_app
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.readiness import Readiness

if TYPE_CHECKING:
    from toolkit_lm.frontend import AsyncLLM

logger = logging.getLogger("uvicorn.error")

CLOSING = 5
"""Seconds that the last answers, and then the engine, get at the end."""
_POLL = 0.05
"""Seconds between two looks at what has come about."""
_DEAD = 1.0
"""Seconds for which requests are told that the engine has died, before the server ends."""


class InFlight:
    """Counts the requests that an app has under way, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.count -= 1


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the lifecycle's."""
        yield


class Lifecycle:
    """Serves an engine that may still be loading, until a signal stops it or the engine dies."""

    def __init__(self, engine: AsyncLLM, options: ServerOptions, metrics: Metrics, listener: socket.socket) -> None:
        self._engine = engine
        self._listener = listener
        self._shutdown_timeout = options.shutdown_timeout
        self._readiness = Readiness(engine)
        self._app = create_app(engine, options, metrics=metrics, readiness=self._readiness)
        self._in_flight = InFlight(self._app)
        self._server = _Server(_settings(self._in_flight, options))
        self._stopped = False

    async def run(self) -> None:
        """Raises what kept the engine from starting."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
        async with self._app.router.lifespan_context(self._app):
            await self._serve()

    async def _serve(self) -> None:
        logger.info("Listening on %s while the engine starts", url_of(self._listener))
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        starting = asyncio.create_task(self._start())
        try:
            await self._attend(serving, starting)
        finally:
            starting.cancel()
            self._server.should_exit = True
            await serving

    async def _start(self) -> None:
        await self._engine.wait_ready()
        print(f"Serving {self._engine.served_model_name} at {url_of(self._listener)}", flush=True)

    async def _attend(self, serving: asyncio.Task[None], starting: asyncio.Task[None]) -> None:
        while not (serving.done() or self._stopped):
            if starting.done():
                starting.result()
                if self._engine.health().status == "dead":
                    await asyncio.sleep(_DEAD)
                    return
            await asyncio.wait([serving], timeout=_POLL)
        await self._drain()

    async def _drain(self) -> None:
        """Takes no new requests, and gives those under way their time."""
        self._readiness.draining = True
        await self._until_idle(self._shutdown_timeout)
        if self._in_flight.count:
            # What is still under way is told that the engine has been shut down, and so comes to its end.
            close(self._engine)
            await self._until_idle(CLOSING)

    async def _until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._in_flight.count and time.monotonic() < deadline:
            await asyncio.sleep(_POLL)

    def _stop(self, number: int) -> None:
        if self._stopped:
            close(self._engine).join(_DEAD)
            sys.stdout.flush()
            # At once: nothing else is waited for.
            os._exit(128 + number)
        self._stopped = True


def url_of(listener: socket.socket) -> str:
    """The address that a socket listens on, for people."""
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def close(engine: AsyncLLM) -> threading.Thread:
    """Closes the engine. The thread is a daemon: a step that hangs cannot keep the process alive."""
    closing = threading.Thread(target=engine.close, daemon=True)
    closing.start()
    return closing


def _settings(app: ASGIApp, options: ServerOptions) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # The lifecycle enters it before the first connection.
        lifespan="off",
        log_level=options.log_level,
        access_log=options.access_log,
        root_path=options.root_path,
        timeout_graceful_shutdown=CLOSING,
    )
