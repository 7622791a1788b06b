"""Requests to backends over HTTP, and the watch over their health."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct, field
from toolkit_lm_server.caller import Caller
from yarl import URL

from toolkit_lm_router.events import Followers, Source, Sources
from toolkit_lm_router.fleet import Backend, Fleet
from toolkit_lm_router.options import RouterOptions

_OWNER = "toolkit-lm"
"""The owner of models, as servers of ours list them."""
_MOST_BYTES = 4 * 2**20
"""Most bytes of an answer about health or models."""
_LARGE = 2**20
_EACH = 10
"""Checks of health for one look at a backend's models."""
_HOP = {
    b"connection",
    b"keep-alive",
    b"proxy-authenticate",
    b"proxy-authorization",
    b"proxy-connection",
    b"te",
    b"trailer",
    b"transfer-encoding",
    b"upgrade",
}
"""Headers of one connection (RFC 9110, 7.6.1)."""
_FORWARDED = {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"forwarded"}
_NOT_PASSED = {
    *_HOP,
    *_FORWARDED,
    b"host",
    b"content-length",
    b"expect",
    b"x-request-id",
    b"accept-encoding",
}
_KEYS = {b"authorization", b"x-api-key"}
_NOT_ANSWERED = {*_HOP, b"content-length", b"date", b"server", b"x-request-id"}

Headers = Sequence[tuple[bytes, bytes]]
"""Names, in lower case, and values."""


class _Model(Struct):
    id: str
    owned_by: str | None = None


class _Models(Struct):
    data: list[_Model] = field(default_factory=list)


class Upstream:
    """Sends requests to backends. Use it as a context."""

    def __init__(self, options: RouterOptions) -> None:
        self._key = options.backend_key
        self._not_passed = _NOT_PASSED | (_KEYS if self._key is not None else set())
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=options.connect_timeout, sock_read=options.read_timeout
        )
        self._quick = aiohttp.ClientTimeout(total=options.connect_timeout)

    async def __aenter__(self) -> Upstream:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=15, ttl_dns_cache=10)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def send(
        self, backend: Backend, target: str, body: bytes, headers: list[tuple[str, str]]
    ) -> aiohttp.ClientResponse:
        """Sends a POST request. The answer's body is not read yet. Raises aiohttp.ClientError,
        OSError and TimeoutError."""
        url = URL(backend.url + target, encoded=True)
        # aiohttp copies what is not a file, and warns of large copies.
        data = body if len(body) < _LARGE else io.BytesIO(body)
        return await self._session.post(
            url, data=data, headers=headers, timeout=self._timeout, allow_redirects=False
        )

    async def get(self, backend: Backend, path: str) -> tuple[int, bytes]:
        """Status and body of a short answer. Raises aiohttp.ClientError, OSError, TimeoutError."""
        headers = {} if self._key is None else {"Authorization": f"Bearer {self._key}"}
        url = URL(backend.url + path, encoded=True)
        async with self._session.get(
            url, headers=headers, timeout=self._quick, allow_redirects=False
        ) as answer:
            body = await answer.content.read(_MOST_BYTES)
            while len(body) < _MOST_BYTES and (more := await answer.content.read(_MOST_BYTES)):
                body += more
            return answer.status, body

    def headers(
        self, received: Headers, caller: Caller, scheme: str, address: str
    ) -> list[tuple[str, str]]:
        """The headers of a client's request, as a backend gets them."""
        dropped = self._not_passed | _named(received)
        made: list[tuple[str, str]] = []
        before: list[str] = []
        host = ""
        for name, value in received:
            if name not in dropped:
                made.append((name.decode("latin-1"), value.decode("latin-1")))
            elif name == b"x-forwarded-for":
                before.append(value.decode("latin-1"))
            elif name == b"host" and not host:
                host = value.decode("latin-1")
        if self._key is not None:
            made.append(("Authorization", f"Bearer {self._key}"))
        if address:
            made.append(("X-Forwarded-For", ", ".join([*before, address])))
        if host:
            made.append(("X-Forwarded-Host", host))
        return [*made, ("X-Forwarded-Proto", scheme), ("X-Request-ID", caller.request_id)]


def answer_headers(answer: aiohttp.ClientResponse, request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers of a backend's answer, as a client gets them."""
    raw = [(name.lower(), value) for name, value in answer.raw_headers]
    dropped = _NOT_ANSWERED | _named(raw)
    return [
        *((name, value) for name, value in raw if name not in dropped),
        (b"x-request-id", request_id.encode("latin-1")),
    ]


def _named(headers: Headers) -> set[bytes]:
    """Headers that the header Connection names: they are of one connection, too."""
    return {
        word.strip().lower()
        for name, value in headers
        if name == b"connection"
        for word in value.split(b",")
    }


class Watch:
    """Asks backends for their health and their models, each in a task of its own."""

    def __init__(
        self,
        fleet: Fleet,
        upstream: Upstream,
        seconds: float,
        followers: Followers | None = None,
    ) -> None:
        """`followers`: what follows the KV events of backends. None: nothing does."""
        self._fleet = fleet
        self._followers = followers
        self._upstream = upstream
        self._seconds = seconds
        self._tasks: dict[Backend, asyncio.Task[None]] = {}

    def tend(self) -> None:
        """Begins with new backends, and leaves those alone that were removed."""
        present = {*self._fleet.backends.values()}
        for backend in present - self._tasks.keys():
            self._tasks[backend] = asyncio.create_task(self._follow(backend))
        for backend in self._tasks.keys() - present:
            self._tasks.pop(backend).cancel()
            if self._followers is not None:
                self._followers.leave(backend)

    async def close(self) -> None:
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, backend: Backend) -> None:
        count = 0
        while True:
            await self.check(backend, with_models=count % _EACH == 0 or not backend.is_ready)
            count += 1
            await asyncio.sleep(self._seconds)

    async def check(self, backend: Backend, *, with_models: bool = True) -> None:
        """Asks one backend."""
        try:
            status, body = await self._upstream.get(backend, "/health")
            # Servers of others may have no such route: their models tell.
            if status not in (200, 204, 404, 405):
                self._fleet.set_state(backend, "down", _reason(status, body))
                return
            if with_models or status in (404, 405):
                await self._look(backend)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            reason = str(error)[:200] or type(error).__name__
            self._fleet.set_state(backend, "down", reason)
        else:
            if not backend.is_ready:
                backend.num_failures = 0
            self._fleet.set_state(backend, "ready")

    async def _look(self, backend: Backend) -> None:
        status, body = await self._upstream.get(backend, "/v1/models")
        if status != 200:
            raise ValueError(f"/v1/models: {_reason(status, body)}")
        cards = _cards(body)
        backend.is_ours = any(card.get("owned_by") == _OWNER for card in cards)
        # The time of a model of ours is that of the server's start.
        started = cards[0].get("created") if backend.is_ours else None
        is_new = not backend.is_ready or started != backend.started
        self._fleet.set_models(backend, cards, started)
        if self._followers is not None and backend.is_ours:
            if is_new:
                # The index has forgotten it.
                self._followers.leave(backend)
            self._followers.tend(backend, await self._sources(backend))

    async def _sources(self, backend: Backend) -> Sequence[Source]:
        """The engines of a backend that publish KV events. A backend that does not tell is as good
        as others."""
        try:
            status, body = await self._upstream.get(backend, "/kv_event_sources")
            return msgspec.json.decode(body, type=Sources).sources if status == 200 else ()
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, ValueError):
            return ()


def _cards(body: bytes) -> list[dict[str, Any]]:
    """The models of an answer. Raises ValueError."""
    msgspec.json.decode(body, type=_Models)
    cards: list[dict[str, Any]] = msgspec.json.decode(body)["data"]
    return cards


def _reason(status: int, body: bytes) -> str:
    """The reason of a failure."""
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        data = msgspec.json.decode(body)
        if isinstance(data, dict):
            for name in ("reason", "status"):
                if isinstance(data.get(name), str) and data[name]:
                    return str(data[name])[:200]
    return f"the status {status}"


def retry_after(answer: aiohttp.ClientResponse) -> float | None:
    """Seconds of the header Retry-After. None: there is none, or it is a date."""
    value = answer.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() and len(value) < 7 else None
