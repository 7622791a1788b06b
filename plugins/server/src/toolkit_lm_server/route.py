"""The route class of the server, and the reading of a request's headers. They hold for each route,
in any app."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from glob import escape
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import MEDIA_OWNER
from toolkit_lm_serving import ADAPTER, ADAPTERS, CLIENT

from toolkit_lm_server.caller import CALLER, KEY, Caller
from toolkit_lm_server.errors import (
    VLLM_TYPES,
    ApiError,
    ErrorBody,
    as_api_error,
    described,
)
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.json_body import SMALL, Bodies, JsonRequest, read_body
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.key_limits import Account
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.threads import in_shared_thread
from toolkit_lm_server.unknown_fields import IGNORED, UnknownFields
from toolkit_lm_server.watched import Watched

if TYPE_CHECKING:
    from toolkit_lm.processing import RequestOptions
    from toolkit_lm_serving.engine import ServingEngine

REQUEST_ID = "x-request-id"
_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_TRACE = {"traceparent": 128, "tracestate": 4096}
"""W3C headers, and most characters of each. A longer value is dropped."""

Result = TypeVar("Result")
Handle = Callable[[Request], Coroutine[Any, Any, Response]]
"""Answers a request."""
Describe = Callable[[str, bytes], Mapping[str, str]]
"""Makes facts of a request, for its context, of its path and its body of JSON."""
Layer = Callable[["ServerRoute", Handle], Handle]
"""Wraps a route's handler in another."""


class ServerRoute(APIRoute):
    """A route that checks the API key, and whether requests are served. It bounds the body, ends
    the work when the client disconnects, and words errors as OpenAI does.

    `route_class` makes the subclass to use.
    """

    keys: Keys | None
    max_body_bytes: int
    server_options: ServerOptions
    bodies: Bodies
    readiness: Readiness | None
    metrics: Metrics | None
    describers: list[Describe]
    """Plugins that describe bodies."""
    takes_any_type: bool = False
    """Bodies are JSON, whatever their content type is."""
    replaces: bool = False
    """The route may take the place of one of the server's own, where the option `routes` names its
    plugin. It takes the bodies of that one, too."""
    error_body: type[BaseModel] = ErrorBody
    """The shape of errors from `refusal`, for the description of the API."""

    def __init__(
        self,
        path: str,
        endpoint: Callable[..., Any],
        *,
        responses: dict[int | str, dict[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        """Makes an APIRoute with the answers that each route may give. The handler runs in threads
        that clients share, so that none takes them all."""
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
        """The request's scope, with the content type of JSON where bodies need not state it. Pages
        of other sites must state it, because they could send such a request."""
        if not self.takes_any_type or "origin" in request.headers:
            return request.scope
        others = [
            (name, value) for name, value in request.scope["headers"] if name != b"content-type"
        ]
        return {**request.scope, "headers": [*others, (b"content-type", b"application/json")]}

    @staticmethod
    def refusal(error: ApiError) -> Response:
        """The answer to an error. Routes of other vendors' APIs override it."""
        return error.response()

    def get_route_handler(self) -> Handle:
        handle: Handle = super().get_route_handler()
        for layer in reversed(LAYERS):
            handle = layer(self, handle)
        return handle


def _introduced(route: ServerRoute, handle: Handle) -> Handle:
    """A layer that sets the request's caller, and names the request in the answer."""

    async def introduced(request: Request) -> Response:
        caller = caller_of(request)
        caller.unknown = UnknownFields(lenient=not route.server_options.strict_fields)
        caller.keep_alive = route.server_options.sse_keep_alive
        caller.takes_templates = route.server_options.allow_request_chat_template
        caller.refuses_hosted_tools = route.server_options.hosted_tools == "refuse"
        CALLER.set(caller)
        response = await handle(request)
        response.headers[REQUEST_ID] = caller.request_id
        return response

    return introduced


def _worded(route: ServerRoute, handle: Handle) -> Handle:
    """A layer that makes errors answers, in the words of the route's API."""

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
    """A layer that checks the API key where one is needed, that requests are served, and the key's
    limits."""

    async def admitted(request: Request) -> Response:
        account = None
        if route.keys is not None:
            caller = caller_of(request)
            account = (
                route.keys.of_name(caller.key)
                if caller.on_behalf
                else route.keys.find(authorization(request.headers))
            )
            caller.key = caller.client = account.name
            caller.adapters = account.adapters
            caller.models = account.models
        MEDIA_OWNER.set(caller_of(request).key or "")
        if (ready := route.readiness) is not None:
            if ready.draining or ready.engine.health().status != "ready":
                raise ready.refusal()
            _check_model(ready.engine, account, caller_of(request))
            if account is not None:
                account.begin()
        return await handle(request)

    return admitted


def _check_model(engine: Watched, account: Account | None, caller: Caller) -> None:
    """Raises ApiError (404) where the key may not use the engine's model. One that may use it under
    the name of an adapter alone is limited to that adapter."""
    config = getattr(engine, "config", None)
    if account is None or account.models is None or config is None:
        return
    if caller.may_use_model(config.served_model_names):
        return
    if (adapter := caller.adapter) is not None and caller.may_use_model([adapter]):
        caller.adapters = (escape(adapter),) if caller.may_use(adapter) else ()
    else:
        raise ApiError(
            404,
            f"The key {account.name!r} may use no model of this server.",
            param="model",
            code="model_not_found",
        )


def _bounded(route: ServerRoute, handle: Handle) -> Handle:
    """A layer that reads the body within its limits. The work on it ends when the client
    disconnects."""

    kind = _body_kind(route)

    async def bounded(request: Request) -> Response:
        with route.bodies.hold() as reserve:
            body = await read_body(request, route.max_body_bytes, reserve)
            is_large = caller_of(request).is_large = len(body) >= SMALL
            cost = route.bodies.cost
            # It counts characters, one kind at a time: 16 MiB take 20 ms.
            needed = await asyncio.to_thread(cost, body) if is_large else cost(body)
            reserve(needed - len(body))
            if route.describers:
                await _describe(route, request, body)
            read = JsonRequest(request, body, route.bodies, route.scope_of(request), kind)
            response = await unless_disconnected(request.receive, handle(read))
        unknown = caller_of(request).unknown
        if unknown is not None and unknown.names:
            response.headers[IGNORED] = ", ".join(unknown.names)
        return response

    return bounded


async def _describe(route: ServerRoute, request: Request, body: bytes) -> None:
    """Has plugins describe a body of JSON."""
    caller = caller_of(request)
    path: str = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if "json" not in request.headers.get("content-type", "json"):
        return
    for describe in route.describers:
        if caller.is_large:
            found = await asyncio.to_thread(describe, path, body)
        else:
            found = describe(path, body)
        caller.context = {**caller.context, **found}


def _body_kind(route: ServerRoute) -> type[BaseModel] | None:
    """The class of the route's body. None where the body is none, a form, or another value."""
    if route.body_field is None or not any(
        route.body_field is field for field in route.dependant.body_params
    ):
        return None
    kind = route.body_field.field_info.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


LAYERS: Sequence[Layer] = (_introduced, _worded, _admitted, _bounded)
"""Layers around the handler of each ServerRoute, the outermost first."""


def route_class(
    options: ServerOptions,
    keys: Keys | None = None,
    readiness: Readiness | None = None,
    metrics: Metrics | None = None,
) -> type[ServerRoute]:
    """The route class of a server with these options.

    `keys`: clients need one of them. `readiness`: None for routes that work without an engine.
    """
    fields: dict[str, Any] = {
        "keys": keys,
        "max_body_bytes": options.max_body_bytes,
        "server_options": options,
        "readiness": readiness,
        "metrics": metrics,
        "describers": [],
    }
    return type("ServerRoute", (ServerRoute,), {**fields, "bodies": Bodies(options.max_body_bytes)})


def vllm_route(kind: type[ServerRoute]) -> type[ServerRoute]:
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
    """The Authorization header. It has the key of Anthropic's header where that is the only one."""
    key = headers.get("x-api-key")
    return headers.get("authorization", "" if key is None else f"Bearer {key}")


def caller_of(request: Request) -> Caller:
    """The caller of a request. Request ids are for people: no lookup uses them."""
    found: Caller | None = request.scope.get(KEY)
    if found is None:
        request_id = request.headers.get(REQUEST_ID, "")
        found = request.scope[KEY] = Caller(
            request_id=request_id if _ID.fullmatch(request_id) else uuid.uuid4().hex,
            client="" if request.client is None else request.client.host,
        )
    return found


def request_context(request: Request) -> dict[str, str]:
    """Facts of an HTTP request for plugins that watch the engine."""
    caller = caller_of(request)
    route = getattr(request.scope.get("route"), "path", request.url.path)
    own = {"route": route, "request_id": caller.request_id, CLIENT: caller.client}
    context = {**caller.context, **own}
    if caller.adapters is not None:
        context[ADAPTERS] = "\n".join(caller.adapters)
    if caller.adapter is not None:
        context[ADAPTER] = caller.adapter
    for name, most in _TRACE.items():
        value = request.headers.get(name, "")
        if 0 < len(value) <= most and value.isascii() and value.isprintable():
            context[name] = value
    return context


async def unless_disconnected(receive: Receive, work: Awaitable[Result]) -> Result:
    """The result of `work`. The work is cancelled, and has ended, when the client disconnects
    (ClientDisconnect) or the caller is cancelled.

    The request's body must have been read: `receive` then tells of the disconnect only. The work
    runs in the caller's task: one of its own would cost each request four turns of the event loop.
    """
    # A timeout without a time: the disconnect sets it.
    scope = asyncio.timeout(None)
    watch = asyncio.create_task(_end_when_disconnected(receive, scope))
    try:
        async with scope:
            return await work
    except Exception:
        if scope.expired():
            raise ClientDisconnect from None
        raise
    finally:
        watch.cancel()


async def _end_when_disconnected(receive: Receive, scope: asyncio.Timeout) -> None:
    # A client that cannot be heard any more has gone, too.
    with suppress(Exception):
        while (await receive())["type"] != "http.disconnect":
            pass
    scope.reschedule(0)


def check_generates(engine: ServingEngine) -> None:
    """Raises RequestError for a model that only pools."""
    if "generate" not in engine.tasks:
        raise RequestError(
            f"this model generates no text. Supported: {', '.join(engine.tasks)}.", "task"
        )


def check_priority(engine: ServingEngine, options: RequestOptions) -> None:
    """Raises RequestError for a priority that the scheduling policy ignores."""
    if not options.get("priority"):
        return
    policies = engine.plugins.scheduling_policies
    if not policies.get(engine.config.scheduler.policy).reads_priority:
        able = " or ".join(entry.key for entry in policies.entries() if entry.reads_priority)
        raise RequestError(
            "priority has no effect here. Leave it out, or ask the operator to schedule by it "
            f"(scheduling_policy={able}).",
            "priority",
        )
