"""The app of a pool: its own routes, and the way to those of the models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any, cast

from fastapi import APIRouter, FastAPI, Query
from pydantic import BaseModel
from toolkit_lm import __version__
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.app import add_own_routes, make_app, serve_routes
from toolkit_lm_server.errors import ApiError, described
from toolkit_lm_server.health import Readiness
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.route import ServerRoute, route_class
from toolkit_lm_serving.budget import request_memory

from toolkit_lm_model_pool import schemas
from toolkit_lm_model_pool.description import describe
from toolkit_lm_model_pool.dispatch import Dispatch
from toolkit_lm_model_pool.figures import PoolMetrics
from toolkit_lm_model_pool.listing import Listing
from toolkit_lm_model_pool.model import PooledModel
from toolkit_lm_model_pool.names import find
from toolkit_lm_model_pool.page import PoolPage
from toolkit_lm_model_pool.pool import Pool

Name = Annotated[str, Query(min_length=1, max_length=256)]
"""A model's name in a query."""
Reread = Callable[[], list[PooledModel]]
"""Function that reads the models anew, for a reload. It raises ConfigError."""


class Management:
    """Handlers that change what is loaded, for operators."""

    def __init__(self, pool: Pool, reread: Reread) -> None:
        self._pool = pool
        self._reread = reread

    async def load(self, body: schemas.NamedBody) -> dict[str, Any]:
        """Loads a model or wakes it up, and answers when it is ready."""
        model = find(self._pool.models, body.model)
        self._pool.reset(model)
        await self._pool.loaded(model)
        return {"success": True, "models": [model.name]}

    async def unload(self, body: schemas.NamedBody) -> dict[str, Any]:
        """Unloads a model, once its requests have ended."""
        model = find(self._pool.models, body.model)
        if model.entry.pin:
            raise ApiError(
                400, f"The model {model.name!r} is pinned: it stays loaded.", param="model"
            )
        await self._pool.unload(model)
        return {"success": True, "models": [model.name]}

    async def sleep(self, body: schemas.SleepBody) -> dict[str, Any]:
        """Puts a loaded model to sleep, once its requests have ended: its process stays."""
        model = find(self._pool.models, body.model)
        if model.entry.pin:
            raise ApiError(
                400, f"The model {model.name!r} is pinned: it stays loaded.", param="model"
            )
        await self._pool.sleep(model, body.level or model.entry.sleep_level)
        return {"success": True, "models": [model.name]}

    async def sleep_by_query(
        self, model: Name | None = None, level: Annotated[int, Query(ge=1, le=2)] = 1
    ) -> dict[str, Any]:
        """Puts a loaded model to sleep, as vLLM's route does."""
        found = find(self._pool.models, model)
        return await self.sleep(schemas.SleepBody(model=found.name, level=cast(Any, level)))

    async def wake_up_by_query(self, model: Name | None = None) -> dict[str, Any]:
        """Wakes a model up, as vLLM's route does."""
        return await self.load(schemas.NamedBody(model=find(self._pool.models, model).name))

    async def is_sleeping(self, model: Name | None = None) -> dict[str, bool]:
        """Says whether a model is asleep."""
        return {"is_sleeping": find(self._pool.models, model).state == "asleep"}

    async def unload_all(self, body: schemas.UnloadBody | None = None) -> dict[str, Any]:
        """Unloads a model, or all but the pinned, once their requests have ended."""
        if body is not None and body.model is not None:
            return await self.unload(schemas.NamedBody(model=body.model))
        models = [model for model in self._pool.models.values() if not model.entry.pin]
        await asyncio.gather(*map(self._pool.unload, models))
        return {"success": True, "models": [model.name for model in models]}

    async def reload(self) -> dict[str, list[str]]:
        """Reads the file of models anew. A file with a fault changes nothing."""
        try:
            return await reload(self._pool, self._reread)
        except ConfigError as error:
            raise ApiError(400, str(error), code="wrong_models") from error


async def reload(pool: Pool, reread: Reread) -> dict[str, list[str]]:
    """Reads the models anew. Raises ConfigError, and changes nothing then."""

    def read() -> list[PooledModel]:
        models = reread()
        pool.check(models)
        return models

    added, changed, removed = pool.replace(await asyncio.to_thread(read))
    return {"added": added, "changed": changed, "removed": removed}


def make_pool_app(
    pool: Pool,
    options: ServerOptions,
    metrics: Metrics,
    readiness: Readiness,
    keys: Keys | None,
    reread: Reread,
) -> FastAPI:
    """The app of a pool's server. The caller owns the pool."""
    pool.transitions.keys = keys
    pool.transitions.memory = request_memory(options.max_request_bytes)
    app = make_app(options)
    kind = route_class(options, keys, readiness, metrics)
    router = APIRouter(route_class=kind)
    add_own_routes(router, options, keys, readiness, None)
    router.add_api_route(
        "/metrics",
        PoolMetrics(pool, metrics).metrics,
        response_model=None,
        route_class_override=route_class(options, keys),
    )
    _add_listing(router, Listing(pool), options)
    if options.admin_routes:
        _add_management(router, Management(pool, reread), kind)
    page = PoolPage(pool, options, metrics) if options.ui else None
    if page is not None:
        page.add_routes(router, route_class(options, keys), readiness, None)
    app.state.api = router.routes
    serve_routes(app, router)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        try:
            with nullcontext() if page is None else page.log.attached():
                yield
        finally:
            await pool.stop()

    app.router.lifespan_context = lifespan
    dispatch = Dispatch(app, pool, options, keys, readiness, metrics)
    app.router.default = dispatch
    describe(app, dispatch.routes)
    return app


def _version() -> dict[str, str]:
    """The version of toolkit-lm."""
    return {"version": __version__}


def _add_listing(router: APIRouter, listing: Listing, options: ServerOptions) -> None:
    routes: list[tuple[str, Callable[..., Any], type[BaseModel]]] = [
        ("/v1/models", listing.models, schemas.PoolList),
        ("/models", listing.models, schemas.PoolList),
        ("/v1/models/{model:path}", listing.model, schemas.PoolCard),
        ("/running", listing.running, schemas.RunningList),
        ("/load", listing.load, schemas.Load),
    ]
    has_ollama = options.routes is None or "ollama" in options.routes
    if has_ollama:
        routes += [
            ("/api/tags", listing.tags, schemas.Tags),
            ("/api/ps", listing.loaded, schemas.RunningTags),
            ("/api/version", _version, schemas.Version),
        ]
    for path, handler, kind in routes:
        router.add_api_route(
            path, handler, response_model=None, responses=answers(kind) | described(404)
        )
    if has_ollama:
        router.add_api_route(
            "/api/show",
            listing.show,
            methods=["POST"],
            response_model=None,
            responses=answers(schemas.Card) | described(404),
            route_class_override=type("AnyType", (router.route_class,), {"takes_any_type": True}),
        )


def _add_management(router: APIRouter, management: Management, kind: type[ServerRoute]) -> None:
    router.add_api_route(
        "/is_sleeping",
        management.is_sleeping,
        response_model=None,
        responses=answers(schemas.Sleeping) | described(404),
        route_class_override=kind,
    )
    for path, handler, answer in (
        ("/models/load", management.load, schemas.Done),
        ("/models/unload", management.unload, schemas.Done),
        ("/models/sleep", management.sleep, schemas.Done),
        ("/models/wake_up", management.load, schemas.Done),
        ("/sleep", management.sleep_by_query, schemas.Done),
        ("/wake_up", management.wake_up_by_query, schemas.Done),
        ("/unload", management.unload_all, schemas.Done),
        ("/models/reload", management.reload, schemas.Reloaded),
    ):
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            responses=answers(answer) | described(404),
            route_class_override=kind,
        )
