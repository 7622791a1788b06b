"""The route class of the server, and what a request's headers say: what holds for each route, in whichever app it is mounted."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from toolkit_lm_server.errors import RETRY_AFTER, ApiError, ErrorBody, as_api_error, described, printable
from toolkit_lm_server.fairness import CLIENT
from toolkit_lm_server.json_request import JsonRequest
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.readiness import Readiness

REQUEST_ID = "x-request-id"
_KEY = "toolkit_lm.request_id"
_ACCOUNT = "toolkit_lm.account"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE = {"traceparent": 128, "tracestate": 4096}
"""W3C headers, and the most characters that are taken of each; a longer one is dropped."""

_BODIES = 16
"""So many bodies of max_body_size may be read or worked on at a time."""

Result = TypeVar("Result")


class Bodies:
    """The bodies of requests that are read or worked on, all together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """For one body. What it gives takes the bytes that have come, and raises ApiError (503) where the others leave no room."""
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if self._held + size > self._most:
                headers = {"Retry-After": str(RETRY_AFTER)}
                raise ApiError(503, "The server is busy with other requests' bodies. Try again later.", code="server_busy", headers=headers)
            held += size
            self._held += size

        try:
            yield take
        finally:
            self._held -= held


class ServerRoute(APIRoute):
    """Checks the API key and whether requests are served now, bounds the body, ends the work when the client disconnects, and words errors
    as OpenAI does.

    `route_class` makes the subclass to use.
    """

    keys: Keys | None
    max_body_bytes: int
    bodies: Bodies
    readiness: Readiness | None
    metrics: Metrics | None

    def __init__(self, *arguments: Any, responses: dict[int | str, dict[str, Any]] | None = None, **options: Any) -> None:
        """As APIRoute, with the answers that each route may give."""
        super().__init__(*arguments, responses={**self._described(), **(responses or {})}, **options)

    @classmethod
    def _described(cls) -> dict[int | str, dict[str, Any]]:
        key, engine = (401,) if cls.keys is not None else (), (503,) if cls.readiness is not None else ()
        # Without a default, FastAPI would add one of its own, 422.
        other = {"default": {"model": ErrorBody, "description": "Any other error."}}
        limits = (429,) if engine and cls.keys is not None and cls.keys.limited else ()
        return described(400, *key, 413, 415, *limits, 500, *engine) | other

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def respond(request: Request) -> Response:
            try:
                account = None if self.keys is None else self.keys.find(request.headers.get("authorization", ""))
                request.scope[_ACCOUNT] = account
                if self.readiness is not None:
                    self.readiness.check()
                    if account is not None:
                        account.begin()
                check_encoding(request)
                with self.bodies.hold() as take:
                    body = await read_body(request, self.max_body_bytes, take)
                    response = await unless_disconnected(request.receive, handle(JsonRequest(request.scope, _replay(body))))
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                response = as_api_error(error).response()
                if self.metrics is not None:
                    self.metrics.refused(response.status_code)
            response.headers[REQUEST_ID] = request_id(request)
            return response

        return respond


def route_class(
    options: ServerOptions, keys: Keys | None = None, readiness: Readiness | None = None, metrics: Metrics | None = None
) -> type[ServerRoute]:
    """The route class of a server with these options.

    `keys`: of which clients need one. `readiness`: None for routes that work without an engine.
    """
    fields = {"keys": keys, "max_body_bytes": options.max_body_bytes, "readiness": readiness, "metrics": metrics}
    return type("ServerRoute", (ServerRoute,), {**fields, "bodies": Bodies(_BODIES * options.max_body_bytes)})


def with_body(handler: Callable[[Any, Request], Awaitable[Response]], kind: type[Any]) -> Callable[[Any, Request], Awaitable[Response]]:
    """A handler (body, request) whose body is of the class `kind`, which FastAPI reads from the signature."""

    async def handle(body: Any, request: Request) -> Response:
        return await handler(body, request)

    handle.__name__, handle.__doc__ = handler.__name__, handler.__doc__
    handle.__annotations__ = {"body": kind, "request": Request, "return": Response}
    return handle


def request_id(request: Request) -> str:
    """The client's x-request-id where it is a plain word, else one of our own. It is for people: nothing is found by it."""
    if _KEY not in request.scope:
        given = request.headers.get(REQUEST_ID, "")
        request.scope[_KEY] = given if _ID.fullmatch(given) else uuid.uuid4().hex
    found: str = request.scope[_KEY]
    return found


def request_context(request: Request) -> dict[str, str]:
    """What plugins that watch the engine are told of an HTTP request."""
    route = getattr(request.scope.get("route"), "path", request.url.path)
    context = {"route": route, "request_id": request_id(request), CLIENT: client_of(request)}
    for name, most in _TRACE.items():
        value = request.headers.get(name, "")
        if 0 < len(value) <= most and value.isascii() and value.isprintable():
            context[name] = value
    return context


def client_of(request: Request) -> str:
    """Whose turn it is: the name of the client's key, else its address."""
    if (account := request.scope.get(_ACCOUNT)) is not None:
        name: str = account.name
        return name
    return "" if request.client is None else request.client.host


def check_encoding(request: Request) -> None:
    """Raises ApiError (415) for a body that is compressed: it may be of any size, whatever its number of bytes."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415, f"The body's content-encoding is {printable(encoding)!r}. Send it without compression.", code="unsupported_encoding"
        )


async def read_body(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """The body, whose parts `take` is told of.

    Raises ApiError (413) as soon as it is seen to be larger than `most` bytes, ClientDisconnect when it breaks off.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    body, more = bytearray(), True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part = message.get("body", b"")
        take(len(part))
        body += part
        if len(body) > most:
            raise _too_large(most)
        more = message.get("more_body", False)
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"The body is larger than {most} bytes (max_body_size).", code="request_too_large")


def _replay(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns. It is cancelled, and has ended, when the client disconnects (ClientDisconnect) or the caller is cancelled.

    The request's body must have been read: `receive` then tells of the disconnect only.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
