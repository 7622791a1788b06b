"""Limits of the server's connections: their number, and how long each may keep the server
waiting."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, cast

import h11
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from toolkit_lm_server.errors import RETRY_AFTER, ApiError
from toolkit_lm_server.listening import UNIX
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.request_log import POLLS, log_answer, log_request
from toolkit_lm_server.threads import CLOSING

_SPARE = 32
"""Connections beyond the maximum. They are told that the server is busy, or its health."""
_BACKLOG = 2048
"""Connections that the kernel keeps until the server takes them."""
_MOST_HEADERS = 100
_SLOWEST = 1024
"""Bytes that a client must read in a second while a part of its answer waits. Fewer are enough
where fewer wait."""
_TOGETHER = 2**16
"""Bytes that are sent at once, whatever else the app is about to write."""
_LOOK = 0.5
"""Seconds from one check of what connections wait for to the next."""

Wait = Literal["head", "body", "reader", "server"]
"""The reason why a connection waits: a part of the request, the client that reads its answer, or
the server."""


class _Stage(NamedTuple):
    """The reason why a connection waits. A stage with new progress is another one."""

    wait: Wait
    progress: object


class HttpServer(uvicorn.Server):
    """Serves an app over a bounded number of connections."""

    def __init__(
        self, app: ASGIApp, options: ServerOptions, context: ssl.SSLContext | None = None
    ) -> None:
        """`context`: TLS of the connections. None: they are not secured."""
        self.bounded = Connections(options, context)
        super().__init__(_settings(app, options, self.bounded))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals: the lifecycle does."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self._watching = asyncio.create_task(self.bounded.watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().shutdown(sockets)
        finally:
            self._watching.cancel()


class Connections:
    """All connections of a server. Beyond the maximum, a new one takes the place of the one that
    has been idle for longest."""

    def __init__(self, options: ServerOptions, context: ssl.SSLContext | None = None) -> None:
        self.context = context
        """TLS of new connections. None: they are not secured."""
        self._most = options.num_connections
        # Few files are left to a server that may have few connections.
        self._spare = min(_SPARE, max(1, self._most // 4))
        self._seconds = {
            "head": options.header_timeout,
            "body": options.body_timeout,
            "reader": options.write_timeout,
        }
        self.least_read = _SLOWEST * options.write_timeout
        """Bytes of its answer that a client must read within write_timeout, or all where fewer
        wait."""
        self._max_header_bytes = options.max_header_bytes
        self._stages: dict[AnyConnection, tuple[_Stage, float]] = {}
        """The stage of each connection, and the time since when it lasts."""
        self._idle: dict[AnyConnection, None] = {}
        """Connections without a request, the longest idle first."""
        self._kind = type("Connection", (Connection,), {"pool": self})

    def protocol(self, **options: Any) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        connection = self._kind(**options)
        return (
            connection
            if self.context is None
            else Handshake(connection, self.context, self._seconds["head"])
        )

    def opened(self, connection: AnyConnection) -> None:
        """Takes a connection in. Where there are too many, the longest idle one is ended."""
        self._stages[connection] = connection.stage(), time.monotonic()
        self._idle[connection] = None
        if len(self._stages) <= self._most:
            return
        longest = next(iter(self._idle))
        if longest is not connection or len(self._stages) > self._most + self._spare:
            longest.abort()

    def closed(self, connection: AnyConnection) -> None:
        """Forgets a connection."""
        self._stages.pop(connection, None)
        self._idle.pop(connection, None)

    def seen(self, connection: AnyConnection) -> None:
        """Takes note of whether a connection has a request."""
        if connection not in self._stages:
            return
        if connection.is_idle:
            self._idle.setdefault(connection)
        else:
            self._idle.pop(connection, None)

    def check(self, scope: Scope) -> None:
        """Raises ApiError (400) for a body without one clear end, (431) for too many headers, (503)
        where too many are under way."""
        headers = scope["headers"]
        names = {name for name, _ in headers}
        if b"transfer-encoding" in names and (
            b"content-length" in names or scope["http_version"] == "1.0"
        ):
            # A proxy in front may take another end, and the rest for a request of its own (RFC
            # 9112, 6.1 and 11.2).
            raise ApiError(
                400,
                "Transfer-Encoding is for HTTP/1.1 alone, and without Content-Length.",
                code="invalid_framing",
            )
        if (
            len(headers) > _MOST_HEADERS
            or sum(len(name) + len(value) for name, value in headers) > self._max_header_bytes
        ):
            raise _large_head()
        num_busy = len(self._stages) - len(self._idle)
        if num_busy > self._most and scope["path"].removeprefix(scope["root_path"]) not in POLLS:
            retry = {"Retry-After": str(RETRY_AFTER)}
            raise ApiError(
                503,
                f"The server has {self._most} requests under way (max_connections). Try again "
                "later.",
                code="server_busy",
                headers=retry,
            )

    def head_error(self, num_bytes: int, message: str) -> ApiError:
        """The error of a head that cannot be read. `num_bytes`: bytes of it that wait."""
        return _large_head() if num_bytes > self._max_header_bytes else ApiError(400, message)

    async def watch(self) -> None:
        """Ends connections that wait for their client for too long."""
        while True:
            await asyncio.sleep(_LOOK)
            now = time.monotonic()
            for connection, (before, since) in list(self._stages.items()):
                stage = connection.stage()
                if stage != before:
                    self._stages[connection] = stage, now
                elif now - since > self._seconds.get(stage.wait, float("inf")):
                    connection.expire(stage.wait)
                self.seen(connection)

    @property
    def num_unread(self) -> int:
        """Number of connections whose answer is not sent to its end."""
        return sum(connection.num_unsent > 0 for connection in self._stages)

    def abort(self) -> None:
        """Ends all connections at once."""
        for connection in list(self._stages):
            connection.abort()


class Counted:
    """A transport that counts what is written. Parts that are written in one turn of the event loop
    are sent together: a call of the system takes longer than most of them."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._num_written = 0
        self._held = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self._num_written += len(data)
        if data and not self._held:
            asyncio.get_running_loop().call_soon(self.flush)
        self._held += data
        if len(self._held) >= _TOGETHER:
            # The transport tells the app to pause.
            self.flush()

    def writelines(self, data: Iterable[bytes]) -> None:
        self.write(b"".join(data))

    def flush(self) -> None:
        """Sends what was written."""
        if self._held:
            held = self._held
            self._held = bytearray()
            self._transport.write(held)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._held.clear()
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return len(self._held) + self._transport.get_write_buffer_size()

    @property
    def num_taken(self) -> int:
        """Bytes that the client's side has taken so far."""
        return self._num_written - self.get_write_buffer_size()


class Connection(H11Protocol):
    """One connection. `Connections` makes the subclass to use."""

    pool: Connections
    handshake: Handshake | None = None
    """The TLS handshake that secures the connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._served: Any = self.app
        self.app = self._answer
        self._goal = 0
        """Bytes that the client must have taken for the timer to start anew."""

    @property
    def num_unsent(self) -> int:
        """Bytes that the client has not taken yet."""
        inner = 0 if self.handshake is None else self.transport.get_write_buffer_size()
        return inner + self._written.get_write_buffer_size()

    @property
    def is_idle(self) -> bool:
        """Whether the connection has neither a request nor bytes to send."""
        return (self.cycle is None or self.cycle.response_complete) and not self.num_unsent

    def stage(self) -> _Stage:
        if (waiting := self.num_unsent) or self.transport.is_closing():
            # Data written meanwhile, comments too, is not the client's progress.
            if (taken := self._written.num_taken) >= self._goal:
                self._goal = taken + max(1, min(waiting, self.pool.least_read))
            return _Stage("reader", self._goal)
        self._goal = 0
        if self.conn.their_state is h11.SEND_BODY and not self.flow.read_paused:
            return _Stage("body", self.cycle)
        # Between two requests uvicorn has a timer of its own.
        if self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            return _Stage("head", self.cycle)
        return _Stage("server", None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.handshake is None:
            self._written = Counted(transport)
            transport = cast(asyncio.Transport, self._written)
        else:
            self._written = self.handshake.below
        super().connection_made(transport)
        if transport.get_extra_info("socket").family == socket.AF_UNIX:
            self.client = (UNIX, 0)
        if self.handshake is not None:
            self.pool.closed(self.handshake)
        self.pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.pool.closed(self)
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        self.pool.seen(self)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._written.flush()
        self.pool.seen(self)

    def send_400_response(self, msg: str) -> None:
        """Answers what uvicorn cannot read: no HTTP, or a head without an end."""
        self._refuse(self.pool.head_error(len(self.conn.trailing_data[0]), msg))

    def expire(self, wait: Wait) -> None:
        """Ends the connection because its client takes too long."""
        nothing_came = wait == "head" and not self.conn.trailing_data[0]
        if wait == "reader" or nothing_came:
            self.abort()
        else:
            self._refuse(
                ApiError(
                    408,
                    f"The request's {wait} took too long ({wait}_timeout).",
                    code="request_timeout",
                )
            )

    def abort(self) -> None:
        """Ends the connection at once. Its place is free at once, too."""
        self.pool.closed(self)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answers without the app, and closes."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.abort()
            return
        log_answer(":".join(map(str, self.client or ())), "-", error.status, str(error))
        answer = error.response()
        headers = [*answer.raw_headers, (b"connection", b"close")]
        body = h11.Data(data=bytes(answer.body))
        for event in (
            h11.Response(status_code=answer.status_code, headers=headers),
            body,
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self.pool.check(scope)
        except ApiError as error:
            log_request(scope, error.status, None, str(error))
            answer = error.response()
            answer.headers["connection"] = "close"
            await answer(scope, receive, send)
        else:
            await self._served(scope, receive, send)


class Handshake(SSLProtocol):
    """A connection whose TLS handshake is under way. Afterwards, its Connection reads and writes
    through it."""

    below: Counted
    num_unsent = 0
    is_idle = True

    def __init__(self, inner: Connection, context: ssl.SSLContext, seconds: int) -> None:
        """`seconds`: the longest time of the handshake."""
        loop = asyncio.get_running_loop()
        end = CLOSING
        super().__init__(
            loop,
            inner,
            context,
            cast(Any, None),
            server_side=True,
            ssl_handshake_timeout=seconds,
            ssl_shutdown_timeout=end,
        )
        self._inner = inner
        inner.handshake = self

    def stage(self) -> _Stage:
        return _Stage("head", None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.below = Counted(transport)
        super().connection_made(cast(asyncio.Transport, self.below))
        self._inner.pool.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._inner.pool.closed(self)
        super().connection_lost(exc)

    def expire(self, wait: Wait) -> None:
        """Ends the connection because its client takes too long."""
        self.abort()

    def abort(self) -> None:
        """Ends the connection at once. Its place is free at once, too."""
        self._inner.pool.closed(self)
        self.below.abort()


AnyConnection = Connection | Handshake


def _large_head() -> ApiError:
    return ApiError(
        431,
        f"The request has more than {_MOST_HEADERS} headers, or they are too large "
        "(max_header_size). Leave some out.",
        code="headers_too_large",
    )


def _settings(app: ASGIApp, options: ServerOptions, connections: Connections) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=cast(Any, connections.protocol),
        # They would leave the bounds.
        ws="none",
        # The lifecycle enters the app's.
        lifespan="off",
        # Whose process it is configures its log: `toolkit serve` does, an app may.
        log_config=None,
        access_log=False,
        root_path=options.root_path,
        forwarded_allow_ips=_proxies(options),
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=CLOSING,
        h11_max_incomplete_event_size=options.max_header_bytes,
        # asyncio takes so many at a time, before any is counted. Where there is no file descriptor
        # left, it tries each of them in vain, and then all of them so many times over.
        backlog=1,
    )


def _proxies(options: ServerOptions) -> str:
    """The proxies whose X-Forwarded-For is believed: programs of this machine."""
    trusted = os.environ.get("FORWARDED_ALLOW_IPS", "127.0.0.1")
    return trusted if options.uds is None or trusted == "*" else f"{trusted},{UNIX}"
