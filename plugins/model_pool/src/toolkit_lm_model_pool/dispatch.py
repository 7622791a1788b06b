"""The way of a request to its model: the key's check, the body's name, the wait, the model's own
routes."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AsyncExitStack
from datetime import UTC, datetime

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute, Match
from starlette.types import Message, Receive, Scope, Send
from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import ApiError, as_api_error
from toolkit_lm_server.event_stream import EventStream
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.json_body import Bodies, read_body
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.route import REQUEST_ID, authorization, caller_of

from toolkit_lm_model_pool.durations import parse_seconds
from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.names import Asked, adapter_of, asked, check_new_adapter, find
from toolkit_lm_model_pool.pool import Pool
from toolkit_lm_model_pool.waiting import Answer, stream_class

_WITH_BODY = ("POST", "PUT", "PATCH")
_OLLAMA = "/api/"
_GENERATING = ("/api/generate", "/api/chat")
_LOADS_ADAPTER = "/load_lora_adapter"
OPERATORS = (
    *("/models/load", "/models/unload", "/unload", "/models/reload", "/models/sleep"),
    *("/models/wake_up", "/sleep", "/wake_up", "/is_sleeping"),
)
"""Paths of the pool's own that are served to operators alone."""


class Dispatch:
    """Answers each path that is none of the pool's own: by the routes of the model that the request
    names. Nothing of a request is looked at before its key."""

    def __init__(
        self,
        app: FastAPI,
        pool: Pool,
        options: ServerOptions,
        keys: Keys | None,
        readiness: Readiness,
        metrics: Metrics,
    ) -> None:
        self._router = app.router
        self._not_found = app.router.default
        self._pool = pool
        self._options = options
        self._keys = keys
        self._readiness = readiness
        self._metrics = metrics
        self._bodies = Bodies(options.max_body_bytes)
        self._known: list[FastAPI] = []
        """The latest routes, by which unknown paths are told."""

    def routes(self) -> FastAPI | None:
        """The routes of a model that is loaded, or was. None before the first load."""
        loaded = (model.app for model in self._pool.models.values() if model.app is not None)
        return next(loaded, next(iter(self._known), None))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._not_found(scope, receive, send)
            return
        if self._is_own_with_slash(scope):
            await self._router(scope, receive, send)
            return
        request = Request(scope, receive)
        answer = Answer(request, send)
        try:
            await self._answer(request, answer)
        except ClientDisconnect:
            if not answer.is_early:
                await self._refuse(Response(status_code=499), request, answer)
        except Exception as error:
            if answer.is_begun:
                raise
            response = as_api_error(error).response()
            self._metrics.refused(response.status_code)
            await self._refuse(response, request, answer)

    async def _refuse(self, response: Response, request: Request, send: Answer) -> None:
        if not send.is_begun:
            response.headers[REQUEST_ID] = caller_of(request).request_id
            await response(request.scope, request.receive, send)

    def _is_own_with_slash(self, scope: Scope) -> bool:
        """Takes the slash off the end of a path of the pool's own."""
        prefix = scope.get("root_path", "")
        path = scope["path"].removeprefix(prefix)
        bare = path.rstrip("/")
        if not bare or bare == path or not _has(self._router.routes, scope, bare):
            return False
        scope["path"] = prefix + bare
        scope["raw_path"] = scope["path"].encode()
        return True

    async def _answer(self, request: Request, send: Answer) -> None:
        caller = caller_of(request)
        CALLER.set(caller)
        if self._keys is not None:
            account = self._keys.find(authorization(request.headers))
            caller.key = caller.client = account.name
            caller.adapters = account.adapters
            caller.models = account.models
        if self._readiness.draining:
            raise self._readiness.refusal()
        if (path := request.url.path) in OPERATORS:
            raise HTTPException(404, f"{path} is served where operators ask for it (admin_routes).")
        with self._bodies.hold() as reserve:
            body = b""
            if request.method in _WITH_BODY:
                body = await read_body(request, self._options.max_body_bytes, reserve)
            found = await asked(request, body, self._bodies)
            if found.model is None and self._is_unknown(request.scope):
                raise HTTPException(404, "Not Found")
            model = find(self._pool.models, found.model)
            caller.adapter = adapter_of(model, found.model)
            if found.lora_name is not None and path.endswith(_LOADS_ADAPTER):
                check_new_adapter(self._pool.models, model, found.lora_name)
            if found.unloads and path in _GENERATING:
                _keep(model, found.keep_alive)
                await _unloaded(found, path)(request.scope, request.receive, send)
                return
            await self._pass_on(request, body, model, found, send)

    async def _pass_on(
        self, request: Request, body: bytes, model: PooledModel, found: Asked, send: Answer
    ) -> None:
        receive = _replay(body, request.receive)
        async with AsyncExitStack() as stack:
            async with send.comments(self._stream_class(request, found), model):
                app = await stack.enter_async_context(self._pool.use(model, request.receive))
            if app not in self._known:
                self._known = [*self._known, app][-1:]
            if found.keep_alive is not None and request.url.path.startswith(_OLLAMA):
                _keep(model, found.keep_alive)
            await app(request.scope, receive, send)

    def _stream_class(self, request: Request, found: Asked) -> type[EventStream] | None:
        """The class of the stream that a request asks for. None: it asks for none that may have
        comments, or the operator wants none."""
        if not found.streams or self._options.sse_keep_alive is None:
            return None
        scope = request.scope
        return stream_class(scope["path"].removeprefix(scope.get("root_path", "")))

    def _is_unknown(self, scope: Scope) -> bool:
        """Whether no route has the path, as far as that is known."""
        path = scope["path"].removeprefix(scope.get("root_path", "")).rstrip("/")
        return bool(self._known) and not any(
            _has(app.router.routes, scope, spelled)
            for app in self._known
            for spelled in (path, f"/v1{path}")
        )


def _keep(model: PooledModel, keep_alive: object) -> None:
    """Takes Ollama's keep_alive: until the next request that states one, at most for as long as the
    operator lets the model stay. Raises ApiError (400)."""
    try:
        asked_for = parse_seconds(keep_alive)
    except ValueError as error:
        raise ApiError(400, f"keep_alive: {error}", param="keep_alive") from error
    most = model.settings.keep_alive
    times = [time for time in (asked_for, most) if time is not None]
    model.keep_alive = min(times, default=None)


def _unloaded(found: Asked, path: str) -> Response:
    """Ollama's answer to a request that only unloads: the model goes once it is idle."""
    empty = (
        {"response": ""}
        if path == "/api/generate"
        else {"message": {"role": "assistant", "content": ""}}
    )
    made = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return JSONResponse(
        {
            "model": found.model,
            "created_at": made,
            **empty,
            "done": True,
            "done_reason": "unload",
        }
    )


def _has(routes: Iterable[BaseRoute], scope: Scope, path: str) -> bool:
    other = {**scope, "path": path, "root_path": ""}
    return any(route.matches(other)[0] is not Match.NONE for route in routes)


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body that was read, and then what the client does."""
    sent = False

    async def replayed() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
