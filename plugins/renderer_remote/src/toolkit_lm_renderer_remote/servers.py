"""RenderServers: a request goes to one of several render servers, and to the next where that one
fails."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx
from toolkit_lm.errors import ConfigError, ContextLengthError, RequestError

from toolkit_lm_renderer_remote.connections import LoopConnections
from toolkit_lm_renderer_remote.errors import BadAnswerError, RenderServerError, UnreachableError
from toolkit_lm_renderer_remote.reading import Answer, WrongAnswerError
from toolkit_lm_renderer_remote.wire import MSGPACK

logger = logging.getLogger(__name__)

_ACCEPTED = f"{MSGPACK[0]}, application/json;q=0.5"
_REST = 5.0
"""Seconds for which a server that failed is asked after the others."""
_LATE = 0.1
"""Seconds by which an event loop may look at a connection late. One that looks later stood still:
its connections timed out unseen, and the server is not to blame."""
_CONNECTIONS = 128
_MOST_ERROR = 2**16
"""Bytes of an answer that says what is wrong."""
_MOST_MESSAGE = 1000
_CLIENTS = (400, 413, 422)
"""Statuses that blame the request."""
_BUSY = (429, 503)

Result = TypeVar("Result")


class _FailedError(Exception):
    """One server gave nothing of use. `answered`: it gave something. `rests`: it is asked last for
    a while."""

    def __init__(
        self,
        reason: str,
        *,
        answered: bool,
        rests: bool = True,
        again: bool = False,
        too_large: bool = False,
    ) -> None:
        super().__init__(reason)
        self.answered = answered
        self.rests = rests
        self.too_large = too_large
        """It answered with more than is read of what may be a right answer."""
        self.again = again
        """The connection may have been an old one that the server had given up, or nobody looked at
        it in time: the same server is asked once more."""


class _Body(NamedTuple):
    status: int
    content_type: str
    data: bytes


class RenderServers:
    """Render servers that serve the same model. They are asked by turns, from threads and from
    event loops."""

    def __init__(
        self,
        urls: list[str],
        *,
        timeout: float = 30.0,
        connect_timeout: float = 2.0,
        api_key: str | None = None,
        transport: httpx.MockTransport | None = None,
    ) -> None:
        """Raises ConfigError for an invalid address. No connection is made yet."""
        self._urls = [_checked(url) for url in urls]
        if not self._urls:
            raise ConfigError("renderer_url names no render server.")
        if not (0 < connect_timeout < float("inf") and 0 < timeout < float("inf")):
            raise ConfigError("timeouts of renderer_remote must be positive numbers of seconds.")
        self._timeout = timeout
        self._connect = min(connect_timeout, timeout)
        # Answers that are compressed could be of any size.
        headers = {
            "accept": _ACCEPTED,
            "accept-encoding": "identity",
            "content-type": "application/json",
        }
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        options: dict[str, Any] = {
            "headers": headers,
            "timeout": httpx.Timeout(timeout, connect=self._connect),
            "limits": httpx.Limits(
                max_connections=_CONNECTIONS,
                max_keepalive_connections=_CONNECTIONS,
                keepalive_expiry=20,
            ),
            "transport": transport,
        }
        self._client = httpx.Client(**options)
        # Renderers have no end that they are told of.
        weakref.finalize(self, self._client.close)
        self._connections = LoopConnections(_CONNECTIONS, options)
        self._resting: dict[str, float] = {}
        """Until when, by time.monotonic()."""
        self._turn = 0
        self._lock = threading.Lock()

    def ask(
        self,
        path: str,
        body: bytes,
        read: Callable[[Answer], Result],
        *,
        most: int,
        too_large: str | None = None,
    ) -> Result:
        """Result of `read` for an answer of at most `most` bytes. `too_large`: error to raise if
        the answer is longer because of the request; None: it is the server's fault.

        Raises RequestError if the request is wrong, BadAnswerError and UnreachableError if no
        server gives a usable answer."""
        attempts = _Attempts(self._order(), self._resting, too_large)
        for url in attempts:
            with attempts.attempt():
                return _read(self._post(url + path, body, most), read)
        raise attempts.summed_up()

    async def ask_async(
        self,
        path: str,
        body: bytes,
        read: Callable[[Answer], Result],
        *,
        most: int,
        too_large: str | None = None,
    ) -> Result:
        """Awaitable form of `ask`. `read` is called in a thread."""
        async with self._connections.client() as client:
            attempts = _Attempts(self._order(), self._resting, too_large)
            for url in attempts:
                with attempts.attempt():
                    found = await self._post_async(client, url + path, body, most)
                    return await asyncio.to_thread(_read, found, read)
        raise attempts.summed_up()

    def _order(self) -> list[str]:
        """URLs of the servers in rotation; those that failed recently come last."""
        with self._lock:
            self._turn += 1
            start = self._turn % len(self._urls)
        now = time.monotonic()
        turns = self._urls[start:] + self._urls[:start]
        return sorted(turns, key=lambda url: self._resting.get(url, 0) > now)

    def _post(self, url: str, body: bytes, most: int) -> _Body:
        """An answer, which is read no further than to `most` bytes, and for no longer than the
        timeout. Raises _FailedError."""
        deadline = time.monotonic() + self._timeout
        failing = _failing(self._timeout, self._connect)
        with failing, self._client.stream("POST", url, content=body) as response:
            reading = _Reading(response, most, deadline, self._timeout)
            for part in response.iter_raw():
                reading.add(part)
            return reading.whole()

    async def _post_async(
        self, client: httpx.AsyncClient, url: str, body: bytes, most: int
    ) -> _Body:
        """Awaitable form of `_post`."""
        deadline = time.monotonic() + self._timeout
        with _failing(self._timeout, self._connect):
            async with client.stream("POST", url, content=body) as response:
                reading = _Reading(response, most, deadline, self._timeout)
                async for part in response.aiter_raw():
                    reading.add(part)
                return reading.whole()


class _Attempts:
    """Whom a request goes to, one after the other: `for url in attempts: with attempts.attempt():
    return ...`."""

    def __init__(self, urls: list[str], resting: dict[str, float], too_large: str | None) -> None:
        self._urls = urls
        self._resting = resting
        self._too_large = too_large
        self._failures: list[tuple[str, _FailedError]] = []
        self._last: _FailedError | None = None

    def __iter__(self) -> Iterator[str]:
        for url in self._urls:
            for attempt in range(2):
                yield url
                failure = self._last
                assert failure is not None, "the attempt ended without a result"
                if failure.too_large and self._too_large is not None:
                    raise RequestError(self._too_large) from None
                if failure.again and not attempt:
                    continue
                self._failures.append((url, failure))
                if failure.rests:
                    self._resting[url] = time.monotonic() + _REST
                logger.warning("the render server at %s failed: %s", url, failure)
                break

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Around one attempt: another follows where it fails."""
        try:
            yield
        except _FailedError as failure:
            self._last = failure

    def summed_up(self) -> RenderServerError:
        """With the addresses in the log only: clients have no business with them."""
        wrong = [failure for _, failure in self._failures if failure.answered]
        number = (
            f"{len(self._failures)} render servers"
            if len(self._failures) > 1
            else "the render server"
        )
        if wrong:
            return BadAnswerError(
                f"the prompt was not rendered: {number} gave no usable answer; {wrong[-1]}."
            )
        return UnreachableError(
            f"the prompt was not rendered: {number} gave no answer; {self._failures[-1][1]}. Try "
            "again later."
        )


class _Reading:
    """An answer on its way. Methods raise _FailedError where it is too large, too late, or
    compressed."""

    def __init__(
        self, response: httpx.Response, most: int, deadline: float, timeout: float
    ) -> None:
        if response.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
            raise _FailedError("its answer is compressed", answered=True)
        is_good = response.status_code == 200
        self._response = response
        self._most = most if is_good else _MOST_ERROR
        self._too_large = _FailedError(
            f"its answer has more than {self._most} bytes", answered=True, too_large=is_good
        )
        self._deadline = deadline
        self._timeout = timeout
        self._data = bytearray()
        declared = response.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._most:
            raise self._too_large

    def add(self, part: bytes) -> None:
        self._data += part
        if len(self._data) > self._most:
            raise self._too_large
        if time.monotonic() > self._deadline:
            raise _FailedError(
                f"it gave no whole answer within {self._timeout:g} s", answered=False
            )

    def whole(self) -> _Body:
        return _Body(
            self._response.status_code,
            self._response.headers.get("content-type", ""),
            bytes(self._data),
        )


@contextmanager
def _failing(timeout: float, connect: float) -> Iterator[None]:
    """Turns an error of the connection into a _FailedError. `timeout`, `connect`: seconds for an
    answer and for the connection."""
    started = time.monotonic()
    try:
        yield
    except httpx.ConnectTimeout:
        raise _FailedError(
            f"it took no connection within {connect:g} s",
            answered=False,
            again=time.monotonic() > started + connect + _LATE,
        ) from None
    except httpx.TimeoutException:
        raise _FailedError(f"it gave no answer within {timeout:g} s", answered=False) from None
    except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
        raise _FailedError(
            f"the connection broke off ({type(error).__name__})", answered=False, again=True
        ) from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise _FailedError(
            f"it cannot be reached ({type(error).__name__})", answered=False
        ) from None


def _read(found: _Body, read: Callable[[Answer], Result]) -> Result:
    """Result of `read` for an answer. Raises RequestError for one that blames the request,
    _FailedError for a useless one."""
    if found.status in _CLIENTS:
        raise _refusal(found)
    if found.status in _BUSY:
        raise _FailedError(f"it is busy (status {found.status})", answered=False, rests=False)
    if found.status != 200:
        raise _FailedError(f"it answered with the status {found.status}", answered=True)
    try:
        return read(Answer(found.data, found.content_type))
    except WrongAnswerError as error:
        raise _FailedError(str(error), answered=True) from None


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.username
        or parts.query
        or parts.fragment
    ):
        raise ConfigError(
            f"renderer_url {url!r} is not the address of a server, such as 'http://127.0.0.1:8001'."
        )
    try:
        httpx.URL(url)
        _ = parts.port
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"renderer_url {url!r} is not the address of a server: {error}") from None
    return url.rstrip("/").removesuffix("/v1")


def _refusal(found: _Body) -> RequestError:
    """Error for a request, in the server's own words."""
    try:
        detail = Answer(found.data, found.content_type).error()
    except WrongAnswerError:
        raise _FailedError(
            f"it refused the request (status {found.status}) without a reason",
            answered=True,
            rests=False,
        ) from None
    kind = ContextLengthError if detail.code == "context_length_exceeded" else RequestError
    return kind(detail.message[:_MOST_MESSAGE], detail.param)
