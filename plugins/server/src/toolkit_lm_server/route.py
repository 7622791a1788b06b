"""The route class of the server, and what a request's headers say: what holds for each route, in
whichever app it is mounted."""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope
from toolkit_lm_serving import CLIENT

from toolkit_lm_server.caller import CALLER, KEY, Caller
from toolkit_lm_server.errors import (
    RETRY_AFTER,
    VLLM_TYPES,
    ApiError,
    ErrorBody,
    as_api_error,
    described,
    printable,
)
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.json_measure import measure
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.threads import in_shared_thread
from toolkit_lm_server.unknown_fields import IGNORED, UnknownFields

REQUEST_ID = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE = {"traceparent": 128, "tracestate": 4096}
"""W3C headers, and the most characters that are taken of each; a longer one is dropped."""

_BODIES = 16
"""So many bodies of max_body_size may be read or worked on at a time."""
_COPIES = 5
"""Bytes of memory for each byte of a body: as it came, as a whole, parsed, checked, and handed
on."""
_VALUE = 256
"""Bytes of memory for each value and name of JSON, beside its text: an object of Python, and one of
pydantic."""

_SMALL = 2**15
"""Bytes of a body that is parsed at once."""
_FEWEST_VALUES = 2**14
"""However small max_body_size is, JSON may have so many values."""
_BYTES_OF_VALUE = 64
"""JSON may have one value for so many bytes of max_body_size: each takes time and memory of its
own, however short it is."""

MAX_DEPTH = 100
"""Levels that JSON may be nested. Python bounds its recursion, and what reads a value may need
several calls for each level."""

Result = TypeVar("Result")
Handle = Callable[[Request], Coroutine[Any, Any, Response]]
"""Answers a request."""
Layer = Callable[["ServerRoute", Handle], Handle]
"""What a route's handler becomes with something around it."""


class JsonRequest(Request):
    """A request whose JSON is UTF-8, has no NaN or infinity, and is neither nested too deeply nor
    of too many values."""

    def __init__(
        self, request: Request, body: bytes, bodies: Bodies, scope: Scope | None = None
    ) -> None:
        """`scope`: in the place of the request's own."""
        super().__init__(scope or request.scope, _replay(body))
        self._bytes = body
        self._bodies = bodies

    async def json(self) -> Any:
        """Raises JSONDecodeError, and ValueError for an integer with thousands of digits."""
        if len(self._bytes) < _SMALL:
            return _parse(self._bytes, self._bodies.max_values)
        # The parser lets no other thread run, and so is held to half of the time: one body after
        # the other, with a rest between them.
        async with self._bodies.parsing:
            start = time.perf_counter()
            try:
                return await asyncio.to_thread(_parse, self._bytes, self._bodies.max_values)
            finally:
                await asyncio.sleep(time.perf_counter() - start)


def _most_values(body: bytes) -> int:
    """How many values and names JSON has at most: texts may have the same characters."""
    return sum(map(body.count, (b"[", b"{", b",", b":")))


def _parse(body: bytes, max_values: int) -> Any:
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH or _most_values(body) >= max_values:
        levels, values = measure(body)
        if levels > MAX_DEPTH:
            raise _invalid(f"it is nested more than {MAX_DEPTH} levels deep")
        if values > max_values:
            raise _invalid(
                f"it has {values} values and names, and may have {max_values}: one for "
                f"{_BYTES_OF_VALUE} bytes of max_body_size"
            )
    # No other thread runs meanwhile, and msgspec takes half as long. What it refuses is worded by
    # Python's, or taken: halves of characters.
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(body)
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _invalid("it is not UTF-8") from error
    return json.loads(text, parse_constant=_no_constant)


def _no_constant(name: str) -> NoReturn:
    raise _invalid(f"{name} is not a number in JSON")


def _invalid(why: str) -> json.JSONDecodeError:
    return json.JSONDecodeError(why, "", 0)


class Bodies:
    """The bodies of requests that are read or worked on, all together."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_values = max(max_body_bytes // _BYTES_OF_VALUE, _FEWEST_VALUES)
        largest = max_body_bytes * _COPIES + self.max_values * _VALUE
        self._most = _BODIES * max_body_bytes * _COPIES + largest
        self.parsing = asyncio.Lock()
        self._held = 0

    def cost(self, body: bytes) -> int:
        """Bytes of memory that a body takes while it is worked on, as if it were JSON: no more
        values than `max_values` are parsed."""
        return len(body) * _COPIES + min(_most_values(body), self.max_values) * _VALUE

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """For one body. What it gives takes bytes of memory, and raises ApiError (503) where the
        others leave no room."""
        held = 0

        def take(size: int) -> None:
            nonlocal held
            if self._held + size > self._most:
                headers = {"Retry-After": str(RETRY_AFTER)}
                raise ApiError(
                    503,
                    "The server is busy with other requests' bodies. Try again later.",
                    code="server_busy",
                    headers=headers,
                )
            held += size
            self._held += size

        try:
            yield take
        finally:
            self._held -= held


class ServerRoute(APIRoute):
    """Checks the API key and whether requests are served now, bounds the body, ends the work when
    the client disconnects, and words errors as OpenAI does.

    `route_class` makes the subclass to use.
    """

    keys: Keys | None
    max_body_bytes: int
    server_options: ServerOptions
    bodies: Bodies
    readiness: Readiness | None
    metrics: Metrics | None
    takes_any_type: bool = False
    """A body is JSON, whatever its content type is."""
    error_body: type[BaseModel] = ErrorBody
    """What `refusal` gives, for the description of the API."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        responses: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """As APIRoute, with the answers that each route may give. No client takes all of the
        threads that its handler may need."""
        super().__init__(
            path,
            in_shared_thread(endpoint),
            responses={**self._described(), **(responses or {})},
            **options,
        )

    @classmethod
    def _described(cls) -> dict[int | str, dict[str, Any]]:
        key = (401,) if cls.keys is not None else ()
        engine = (503,) if cls.readiness is not None else ()
        # Without a default, FastAPI would add one of its own, 422.
        other = {"default": {"model": cls.error_body, "description": "Any other error."}}
        limits = (429,) if engine and cls.keys is not None and cls.keys.limited else ()
        return described(400, *key, 413, 415, *limits, 500, *engine, kind=cls.error_body) | other

    def scope_of(self, request: Request) -> Scope:
        """With the content type of JSON, where bodies need not say that they are. A page of another
        site could send it: then they must."""
        if not self.takes_any_type or "origin" in request.headers:
            return request.scope
        others = [
            (name, value) for name, value in request.scope["headers"] if name != b"content-type"
        ]
        return {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}

    @staticmethod
    def refusal(error: ApiError) -> Response:
        """How an error is worded: other vendors' APIs have shapes of their own."""
        return error.response()

    def get_route_handler(self) -> Handle:
        handle: Handle = super().get_route_handler()
        for layer in reversed(LAYERS):
            handle = layer(self, handle)
        return handle


def _introduced(route: ServerRoute, handle: Handle) -> Handle:
    """What is worked on knows who asks, and the answer names the request."""

    async def introduced(request: Request) -> Response:
        caller = caller_of(request)
        caller.unknown = UnknownFields(lenient=not route.server_options.strict_fields)
        caller.keep_alive = route.server_options.sse_keep_alive
        caller.takes_templates = route.server_options.allow_request_chat_template
        CALLER.set(caller)
        response = await handle(request)
        response.headers[REQUEST_ID] = caller.request_id
        return response

    return introduced


def _worded(route: ServerRoute, handle: Handle) -> Handle:
    """Errors become answers, in the words of the route's API."""

    async def worded(request: Request) -> Response:
        try:
            return await handle(request)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            response = route.refusal(as_api_error(error))
            if route.metrics is not None:
                route.metrics.refused(response.status_code)
            return response

    return worded


def _admitted(route: ServerRoute, handle: Handle) -> Handle:
    """Who asks has a key, where one is needed, requests are served, and the key's limits are not
    met."""

    async def admitted(request: Request) -> Response:
        caller = caller_of(request)
        if route.keys is not None:
            caller.account = route.keys.find(authorization(request.headers))
            caller.client = caller.account.name
        if (ready := route.readiness) is not None:
            if ready.draining or ready.engine.health().status != "ready":
                raise ready.refusal()
            if caller.account is not None:
                caller.account.begin()
        return await handle(request)

    return admitted


def _bounded(route: ServerRoute, handle: Handle) -> Handle:
    """The body is read within its limits. The work on it ends when the client disconnects."""

    async def bounded(request: Request) -> Response:
        check_encoding(request)
        with route.bodies.hold() as take:
            body = await read_body(request, route.max_body_bytes, take)
            take(route.bodies.cost(body) - len(body))
            read = JsonRequest(request, body, route.bodies, route.scope_of(request))
            response = await unless_disconnected(request.receive, handle(read))
        unknown = caller_of(request).unknown
        if unknown is not None and unknown.names:
            response.headers[IGNORED] = ", ".join(unknown.names)
        return response

    return bounded


LAYERS: Sequence[Layer] = (_introduced, _worded, _admitted, _bounded)
"""What is around the handler of each ServerRoute, the outermost first."""


def route_class(
    options: ServerOptions,
    keys: Keys | None = None,
    readiness: Readiness | None = None,
    metrics: Metrics | None = None,
) -> type[ServerRoute]:
    """The route class of a server with these options.

    `keys`: of which clients need one. `readiness`: None for routes that work without an engine.
    """
    fields = {
        "keys": keys,
        "max_body_bytes": options.max_body_bytes,
        "server_options": options,
        "readiness": readiness,
        "metrics": metrics,
    }
    return type("ServerRoute", (ServerRoute,), {**fields, "bodies": Bodies(options.max_body_bytes)})


def of_vllm(kind: type[ServerRoute]) -> type[ServerRoute]:
    """The class of a route that vLLM has and OpenAI has not: the types of its errors are vLLM's."""

    def refusal(error: ApiError) -> Response:
        return error.response(VLLM_TYPES)

    return type("VllmRoute", (kind,), {"refusal": staticmethod(refusal)})


def with_body(
    handler: Callable[[Any, Request], Awaitable[Response]], kind: type[Any]
) -> Callable[[Any, Request], Awaitable[Response]]:
    """A handler (body, request) whose body is of the class `kind`, which FastAPI reads from the
    signature."""

    async def handle(body: Any, request: Request) -> Response:
        return await handler(body, request)

    handle.__name__ = handler.__name__
    handle.__doc__ = handler.__doc__
    handle.__annotations__ = {"body": kind, "request": Request, "return": Response}
    return handle


def authorization(headers: Headers) -> str:
    """With the key of the header that Anthropic's clients send, where it is the only one."""
    key = headers.get("x-api-key")
    return headers.get("authorization", "" if key is None else f"Bearer {key}")


def caller_of(request: Request) -> Caller:
    """Who asks. Request ids are for people: nothing is found by them."""
    found: Caller | None = request.scope.get(KEY)
    if found is None:
        given = request.headers.get(REQUEST_ID, "")
        found = request.scope[KEY] = Caller(
            request_id=given if _ID.fullmatch(given) else uuid.uuid4().hex,
            client="" if request.client is None else request.client.host,
        )
    return found


def request_context(request: Request) -> dict[str, str]:
    """What plugins that watch the engine are told of an HTTP request."""
    caller = caller_of(request)
    route = getattr(request.scope.get("route"), "path", request.url.path)
    context = {"route": route, "request_id": caller.request_id, CLIENT: caller.client}
    for name, most in _TRACE.items():
        value = request.headers.get(name, "")
        if 0 < len(value) <= most and value.isascii() and value.isprintable():
            context[name] = value
    return context


def check_encoding(request: Request) -> None:
    """Raises ApiError (415) for a body that is compressed: it may be of any size, whatever its
    number of bytes."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            415,
            f"The body's content-encoding is {printable(encoding)!r}. Send it without compression.",
            code="unsupported_encoding",
        )


async def read_body(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """The body, whose parts `take` is told of.

    Raises ApiError (413) as soon as it is seen to be larger than `most` bytes, ClientDisconnect
    when it breaks off.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > most:
        raise _too_large(most)
    body = bytearray()
    more = True
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
    return ApiError(
        413, f"The body is larger than {most} bytes (max_body_size).", code="request_too_large"
    )


def _replay(body: bytes) -> Receive:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns. It is cancelled, and has ended, when the client disconnects
    (ClientDisconnect) or the caller is cancelled.

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
        # What failed holds this frame, and with it the body, until the garbage collector comes.
        del task, watch


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
