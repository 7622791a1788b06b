"""The router's app: its own routes, and the routed paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp, Receive, Scope, Send
from toolkit_lm import __version__
from toolkit_lm.errors import ConfigError, RequestError, nearest
from toolkit_lm_server.app import make_app
from toolkit_lm_server.caller import CALLER
from toolkit_lm_server.errors import RETRY_AFTER, ApiError, described
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.key_limits import ApiKey
from toolkit_lm_server.route import ServerRoute, caller_of, route_class

from toolkit_lm_router.clients import may_use
from toolkit_lm_router.fleet import Backend, Fleet
from toolkit_lm_router.metrics import RouterMetrics
from toolkit_lm_router.options import RouterOptions, check_url
from toolkit_lm_router.proxy import PATHS, Proxy, path_of
from toolkit_lm_router.schemas import (
    BackendBody,
    BackendInfo,
    BackendList,
    NewBackendBody,
    RoutedModels,
    RouterStatus,
    Version,
)

_MOST_BACKENDS = 10_000


class Router:
    """Handlers of the router's own routes."""

    def __init__(self, fleet: Fleet, proxy: Proxy, metrics: RouterMetrics) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._metrics = metrics

    async def live(self) -> dict[str, Any]:
        """200 while the router runs."""
        return self._status()

    async def health(self) -> Response:
        """200 while at least one backend serves, else 503."""
        status = self._status()
        is_ready = status["status"] == "ready"
        headers = None if is_ready else {"Retry-After": str(RETRY_AFTER)}
        return JSONResponse(status, 200 if is_ready else 503, headers)

    def _status(self) -> dict[str, Any]:
        states = Counter(backend.state for backend in self._fleet.backends.values())
        status = "ready" if self._fleet.num_ready(None) else "starting"
        return {
            "status": "draining" if self._proxy.is_draining else status,
            "backends": dict(sorted(states.items())),
        }

    async def version(self) -> dict[str, str]:
        """The version of toolkit-lm."""
        return {"version": __version__}

    async def metrics(self) -> Response:
        """Figures for Prometheus."""
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self) -> dict[str, Any]:
        """The models of all backends, of those that the key may use."""
        found: dict[str, dict[str, Any]] = {}
        caller = CALLER.get()
        for backend in self._fleet.backends.values():
            for card in backend.cards:
                name = str(card["id"])
                if not may_use(name, caller, self._fleet):
                    continue
                entry = found.setdefault(name, {**card, "object": "model", "backends": 0})
                entry["backends"] += backend.is_ready
        return {"object": "list", "data": [*found.values()]}

    async def list_backends(self) -> dict[str, Any]:
        """The backends and their figures."""
        return {"backends": [_info(b) for b in self._fleet.backends.values()]}

    async def add_backend(self, body: NewBackendBody) -> dict[str, Any]:
        """Adds a backend, or has one that drains take part again. It gets requests when it is
        healthy."""
        if len(self._fleet.backends) >= _MOST_BACKENDS:
            raise ApiError(400, f"The router has {_MOST_BACKENDS} backends: remove some.")
        url = _checked(body.url)
        known = self._fleet.backends.get(url)
        if known is not None and known.role != body.role:
            raise ApiError(400, f"{url} has the role {known.role}: remove it first.", param="role")
        return _info(self._fleet.add(url, body.role))

    async def drain_backend(self, body: BackendBody) -> dict[str, Any]:
        """Sends a backend no new requests. Those that it has go on; `inflight` is 0 when they have
        ended."""
        backend = self._find(body.url)
        self._fleet.set_state(backend, "draining", "an operator drains it")
        return _info(backend)

    async def remove_backend(self, body: BackendBody) -> dict[str, Any]:
        """Forgets a backend. Requests that it has go on."""
        backend = self._find(body.url)
        self._fleet.remove(backend)
        return _info(backend)

    def _find(self, url: str) -> Backend:
        url = _checked(url)
        found = self._fleet.backends.get(url)
        if found is None:
            hint = nearest(url, self._fleet.backends)
            raise ApiError(404, f"There is no backend {url!r}. {hint}", param="url")
        return found


def _checked(url: str) -> str:
    """The URL of a backend. Raises RequestError."""
    try:
        return check_url(url)
    except ConfigError as error:
        raise RequestError(str(error).removeprefix("option 'backend': "), "url") from error


def _info(backend: Backend) -> dict[str, Any]:
    info = BackendInfo(
        url=backend.url,
        state=backend.state,
        reason=backend.reason,
        role=backend.role,
        models=[*backend.models],
        is_ours=backend.is_ours,
        inflight=backend.load,
        requests=backend.num_requests,
        retries=backend.num_retries,
        migrations=backend.num_migrations,
        prefix_hit_share=backend.num_hits / backend.num_chunks if backend.num_chunks else None,
        event_gaps=backend.num_event_gaps if backend.is_followed else None,
        queue_seconds=backend.queue_seconds,
    )
    return info.model_dump()


def create_app(
    options: RouterOptions, fleet: Fleet, proxy: Proxy, metrics: RouterMetrics
) -> FastAPI:
    """The router's own routes as an app."""
    server = options.server
    router = Router(fleet, proxy, metrics)
    app = make_app(server)
    routes = APIRouter(route_class=route_class(server, proxy.keys))
    for path, handler in (("/live", router.live), ("/health", router.health)):
        _add(routes, path, handler, RouterStatus, kind=APIRoute)
    for path in ("/ready", "/ping"):
        _add(routes, path, router.health, RouterStatus, kind=APIRoute)
    _add(routes, "/version", router.version, Version)
    routes.add_api_route("/metrics", router.metrics, response_class=PlainTextResponse)
    _add(routes, "/v1/models", router.models, RoutedModels)
    if options.admin_key is not None:
        keys = Keys([ApiKey(name="admin_key", key=options.admin_key)])
        _add_operators(routes, router, route_class(server, keys))
    app.state.api = routes.routes
    app.include_router(routes)
    app.router.default = _unknown
    return app


def _add_operators(routes: APIRouter, router: Router, kind: type[ServerRoute]) -> None:
    _add(routes, "/router/backends", router.list_backends, BackendList, kind=kind)
    for path, handler in (
        ("/router/backends/add", router.add_backend),
        ("/router/backends/drain", router.drain_backend),
        ("/router/backends/remove", router.remove_backend),
    ):
        _add(routes, path, handler, BackendInfo, kind=kind, method="POST")


def _add(
    routes: APIRouter,
    path: str,
    handler: Callable[..., Any],
    shape: type[Any],
    *,
    kind: type[APIRoute] | None = None,
    method: str = "GET",
) -> None:
    more: dict[str, Any] = {} if kind is None else {"route_class_override": kind}
    errors = described(404) if method == "POST" else {}
    if kind is APIRoute:
        errors = {503: {"model": shape, "description": "Requests are not served now."}}
    routes.add_api_route(
        path,
        handler,
        methods=[method],
        response_model=None,
        responses={200: {"model": shape, "description": "Success."}, **errors},
        **more,
    )


class Routed:
    """The app, with the routed paths in front of the router's own. FastAPI's layers would take a
    fifth of the time of their requests."""

    def __init__(self, proxy: Proxy, app: ASGIApp) -> None:
        self._proxy = proxy
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_routed = (
            scope["type"] == "http" and scope["method"] == "POST" and path_of(scope) in PATHS
        )
        await (self._proxy if is_routed else self._app)(scope, receive, send)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers where there is no route."""
    if scope["type"] != "http":
        return
    response = _no_route(path_of(scope), scope["method"]).response()
    response.headers["x-request-id"] = caller_of(Request(scope)).request_id
    await response(scope, receive, send)


def _no_route(path: str, method: str) -> ApiError:
    if path in PATHS:
        headers = {"Allow": "POST"}
        return ApiError(405, f"{path} takes POST, not {method[:20]}.", headers=headers)
    hint = nearest(path[:200], PATHS, otherwise="")
    return ApiError(
        404,
        f"The router has no route {path[:200]!r}. What one backend keeps, and what changes a "
        f"backend, is asked of the backend itself. {hint}".rstrip(),
        code="not_found",
    )
