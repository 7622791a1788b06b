"""A server from its first connection to its end: it starts, serves, is drained."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack
from typing import Any, Protocol, TypeVar

import psutil
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.frontend import Health

from toolkit_lm_server.app import create_early_app
from toolkit_lm_server.around import wrapped
from toolkit_lm_server.garbage import Garbage
from toolkit_lm_server.health import ALIVE, Readiness
from toolkit_lm_server.hosts import HostCheck, host_names
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.connections import HttpServer
from toolkit_lm_server.listening import UNIX, url_of
from toolkit_lm_server.log import announce, fields
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import HttpOptions, ServerOptions
from toolkit_lm_server.reloading import Reloading
from toolkit_lm_server.report import Throughput, report_start
from toolkit_lm_server.request_log import AnswerCounter, RequestLog
from toolkit_lm_server.start_gate import StartGate
from toolkit_lm_server.supervisor import Supervisor
from toolkit_lm_server.threads import CLOSING, SharedThreads, close, in_thread
from toolkit_lm_server.ui.page import Page
from toolkit_lm_server.watched import Watched

logger = logging.getLogger("uvicorn.error")

Result = TypeVar("Result")

_POLL = 0.05
"""Seconds from one check of the server's state to the next."""
_DEAD = 1.0
"""Seconds for which requests are told that the engine has died. After them the server ends."""
_SWITCH = 0.0005
"""Seconds that a thread may compute while another waits. A request passes through several threads,
and would wait in each for a busy one."""
_ADDRESS = re.compile(r"[0-9A-Fa-f:.]+(%[0-9A-Za-z._-]+)?")
"""An address of a client. A link-local one names an interface."""


class Servable(Watched, Protocol):
    """An AsyncLLM, or an object that a server serves in place of one."""

    @property
    def served_model_name(self) -> str: ...

    @property
    def error(self) -> BaseException | None: ...

    async def wait_ready(self) -> None: ...

    def close(self) -> None: ...


ServableT = TypeVar("ServableT", bound=Servable)
MakeApp = Callable[[ServableT, Metrics, Readiness, Keys | None], FastAPI]
"""Makes the app from an engine, once that is made."""


class InFlight:
    """Counts the requests that an app has under way, streams included."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.count += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self.count -= 1


class KnownClient:
    """Clears the client's address where it is not one. X-Forwarded-For may hold anything, and the
    access log writes it as it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = scope.get("client")
        if client is not None and client[0] != UNIX and not _ADDRESS.fullmatch(client[0]):
            scope["client"] = None
        await self._app(scope, receive, send)


def logged(app: ASGIApp, metrics: AnswerCounter, options: HttpOptions) -> ASGIApp:
    """The app, whose requests are logged and counted."""
    return KnownClient(RequestLog(app, metrics, all_requests=options.access_log))


class _NoEngine:
    """Stands in for an engine that is being made."""

    num_restarts = 0
    num_queued_tokens = 0

    def health(self) -> Health:
        return Health("starting", "configuring")


class _StoppedError(Exception):
    """The server is to end."""


class Lifecycle:
    """Serves an engine until a signal stops the server or the engine dies. The engine is made, and
    loads, while the server answers already."""

    def __init__(
        self,
        making: Future[ServableT],
        make_app: MakeApp[ServableT],
        options: ServerOptions,
        metrics: Metrics,
        listener: socket.socket,
        threads: SharedThreads | None = None,
        page: Page | None = None,
        start_timeout: float = 0.0,
        context: ssl.SSLContext | None = None,
        supervisor: Supervisor | None = None,
    ) -> None:
        """`threads`: for the work of requests that must not block the event loop.

        `start_timeout`: seconds that requests wait for the engine to start. `context`: TLS of the
        connections. `supervisor`: systemd, where it waits for messages.
        """
        self._url = url_of(listener, secure=context is not None)
        self._threads = threads
        self._making: Future[Any] = making
        self._make_app: MakeApp[Any] = make_app
        self._options = options
        self._metrics = metrics
        self._listener = listener
        self._readiness = Readiness(_NoEngine())
        self._keys = Keys.of(options)
        early = create_early_app(options, metrics, self._readiness, page, self._keys)
        self._gate = StartGate(early, self._keys, start_timeout)
        self._in_flight = InFlight(wrapped(self._gate, options))
        checked = HostCheck(self._in_flight, host_names(options, listener))
        self._server = HttpServer(logged(checked, metrics, options), options, context)
        self._page = page
        self._is_started = False
        self._stopped = False
        self._supervisor = supervisor or Supervisor()
        self._reloading = Reloading(options, self._keys, self._server.bounded, self._supervisor)
        self._has_terminal = _has_terminal()

    async def run(self) -> None:
        """Serves until a signal comes. The second one ends the process at once. Raises as
        `serve`."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signalled, number)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        await self.serve()

    async def start(self) -> asyncio.Task[None]:
        """Serves in a task, and returns it when the engine is ready. Raises as `serve`."""
        serving = asyncio.create_task(self.serve())
        opening = asyncio.create_task(self._gate.wait())
        try:
            await asyncio.wait([serving, opening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            opening.cancel()
        if not self._is_started:
            await serving
        return serving

    def stop(self) -> None:
        """Drains the server, and ends it."""
        self._stopped = True

    async def serve(self) -> None:
        """Serves until `stop`. Raises the error that kept the engine from starting, and
        EngineDeadError when the engine has died."""
        asyncio.get_running_loop().set_default_executor(self._threads or SharedThreads())
        if self._making.done():
            # An immediate failure is reported without a server's words around it.
            self._making.result()
        # Resources of plugins' routes are released when the last request has ended.
        async with AsyncExitStack() as lifespan:
            if self._page is not None:
                lifespan.enter_context(self._page.log.attached())
            await self._serve(lifespan)

    async def _serve(self, lifespan: AsyncExitStack) -> None:
        logger.info("Listening on %s while the engine starts", self._url)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        try:
            await self._attend(lifespan)
        finally:
            self._gate.open()
            self._server.should_exit = True
            await self._serving

    async def _attend(self, lifespan: AsyncExitStack) -> None:
        engine = None
        try:
            engine = await self._unless_stopped(asyncio.wrap_future(self._making))
            await self._open(engine, lifespan)
            await self._unless_stopped(engine.wait_ready())
            report_start(engine, time.time() - psutil.Process().create_time())
            garbage = Garbage()
            throughput = Throughput(self._metrics)
            sys.setswitchinterval(_SWITCH)
            self._is_started = True
            self._gate.open()
            status = f"Serving {engine.served_model_name} at {self._url}"
            announce(status, self._options)
            self._supervisor.ready(status)
            while (health := engine.health()).status != "dead":
                self._check_stopped()
                if health.status in ALIVE:
                    self._supervisor.alive()
                await self._reloading.tend(status)
                garbage.tend(is_idle=not self._is_busy)
                throughput.tend()
                await asyncio.wait([self._serving], timeout=_POLL)
            self._supervisor.stopping("The engine has died")
            await asyncio.sleep(_DEAD)
        except _StoppedError:
            await self._drain()
        if engine is not None and engine.error is not None:
            raise EngineDeadError(
                f"the engine has died: {engine.health().reason}"
            ) from engine.error

    async def _open(self, engine: Servable, lifespan: AsyncExitStack) -> None:
        """Puts the engine's routes in the place of the early ones."""
        # Plugins add their routes, which may take a while.
        making = in_thread(
            lambda: self._make_app(engine, self._metrics, self._readiness, self._keys)
        )
        app = await self._unless_stopped(asyncio.wrap_future(making))
        await lifespan.enter_async_context(app.router.lifespan_context(app))
        self._gate.app = app
        self._readiness.engine = engine

    async def _unless_stopped(self, work: Awaitable[Result]) -> Result:
        """The result of `work`. Raises _StoppedError when the server is to end first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._check_stopped()
                await asyncio.wait(
                    [self._serving, task], timeout=_POLL, return_when=asyncio.FIRST_COMPLETED
                )
            return task.result()
        finally:
            # No effect on one that is done.
            task.cancel()

    def _check_stopped(self) -> None:
        if self._stopped or self._serving.done():
            raise _StoppedError

    async def _drain(self) -> None:
        """Says that the server ends, then refuses new requests, and gives those under way their
        time."""
        options = self._options
        start = time.monotonic()
        number = self._in_flight.count
        logger.info(
            "Stopping: %d requests are under way; new ones are refused in %d s, all end in %d s",
            *(number, options.drain_delay, options.drain_delay + options.shutdown_timeout),
            extra=fields(num_requests=number),
        )
        self._supervisor.stopping(f"{number} requests are under way")
        self._readiness.leaving = True
        self._gate.open()
        await self._wait(
            options.drain_delay, lambda: self._readiness.engine.health().status == "ready"
        )
        self._readiness.draining = True
        await self._wait(options.shutdown_timeout, lambda: self._is_busy)
        num_cut = self._in_flight.count
        if self._is_busy:
            # Requests still under way get the error that the engine has been shut down, and so end.
            close(self._making)
            await self._wait(CLOSING, lambda: self._is_busy)
        seconds = time.monotonic() - start
        logger.info(
            "Stopped after %.1f s: %d requests were cut off",
            *(seconds, num_cut),
            extra=fields(num_requests=num_cut, seconds=round(seconds, 3)),
        )
        # Clients that neither send nor read cannot keep the server.
        self._server.bounded.abort()

    @property
    def _is_busy(self) -> bool:
        """Whether answers are being made or sent."""
        return self._in_flight.count > 0 or self._server.bounded.num_unread > 0

    async def _wait(self, seconds: float, condition: Callable[[], bool]) -> None:
        """Waits while the condition holds and the server serves, but no longer than `seconds`."""
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline and not self._serving.done():
            self._supervisor.alive()
            await asyncio.sleep(_POLL)

    def _hang_up(self) -> None:
        """SIGHUP: the end of the terminal, or else an operator who wants files to be read again."""
        if self._has_terminal and not _has_terminal():
            self._stopped = True
        else:
            self._reloading.ask()
            # A server of several models has more files.
            getattr(self._readiness.engine, "ask_reload", lambda: None)()

    def _signalled(self, number: int) -> None:
        if self._stopped:
            wait([close(self._making)], _DEAD)
            sys.stdout.flush()
            # At once: nothing else is waited for.
            os._exit(128 + number)
        self.stop()


def _has_terminal() -> bool:
    """Whether the process has a controlling terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True
