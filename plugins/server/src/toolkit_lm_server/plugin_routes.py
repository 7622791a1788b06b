"""Routes that other plugins bring, by the hook `toolkit_register_routes`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from toolkit_lm.errors import ConfigError, PluginError, nearest
from toolkit_lm.plugin import PluginInfo, Plugins

if TYPE_CHECKING:
    from fastapi import APIRouter
    from fastapi.routing import APIRoute
    from starlette.routing import BaseRoute
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_server.chat import Chat
    from toolkit_lm_server.completions import Completions
    from toolkit_lm_server.engines import Engines
    from toolkit_lm_server.metrics import Metrics
    from toolkit_lm_server.options import ServerOptions
    from toolkit_lm_server.responses.routes import Responses

HOOK = "toolkit_register_routes"

SHIPPED = ("anthropic", "cohere", "ollama")
"""Plugins whose routes are served where they are loaded, unless the option `routes` lists
others."""
OF_MODELS = (
    "batches",
    "kv_disk",
    "kv_events",
    "kv_redis",
    "kv_transfer",
    "lora",
    "mcp",
    "rl",
    "router",
    "transcription",
)
"""Shipped plugins that add routes only where the served model, the engine, or the options of the
server ask for them."""

Lifespan = Callable[[], AbstractAsyncContextManager[object]]
"""The lifespan of a plugin's routes."""


@dataclass(frozen=True)
class OpenAIApi:
    """The server's own API, for routes that translate another to it."""

    engines: Engines
    """The engine of each served model, by its names: `engines[body.model]`."""
    chat: Chat
    completions: Completions
    responses: Responses
    options: ServerOptions
    router: APIRouter
    """The server's router, with all of its routes once they are added."""
    metrics: Metrics | None = None
    """The server's figures; None: it has none."""
    num_requests: Callable[[], int] = lambda: 0
    """Counts the prompts and inputs of requests that are under way or wait."""


def check_names(plugins: Plugins, names: Sequence[str] | None) -> None:
    """Raises ConfigError for a name that no loaded plugin with routes has."""
    known = {info.name for info, _ in plugins.implementations(HOOK)}
    for name in names or ():
        if name not in known:
            raise ConfigError(
                f"option 'routes': no loaded plugin {name!r} has HTTP routes. "
                f"{nearest(name, known)}"
            )


def add_plugin_routes(router: APIRouter, api: OpenAIApi, kind: type[APIRoute]) -> None:
    """Adds the routes of the plugins that the options name, and of the one whose model is served.
    They are added to `router` as routes of class `kind`. Their lifespans are added to the router's
    own.

    Raises ConfigError and PluginError.
    """
    # The command checks names before it imports a web framework.
    from fastapi import APIRouter

    names = api.options.routes
    engine = api.engines[None]
    check_names(engine.plugins, names)
    wanted = {*(SHIPPED if names is None else names), *OF_MODELS, _model_plugin(engine)}
    lifespans: list[tuple[PluginInfo, Lifespan]] = []
    of_server = [*router.routes]
    for info, register in engine.plugins.implementations(HOOK):
        if info.name not in wanted:
            continue
        own = APIRouter(route_class=kind)
        options = engine.plugins.options(info.name)
        with info.boundary(HOOK, passes=()):
            lifespan = register(router=own, engine=engine, options=options, api=api)
        if lifespan is not None:
            if not callable(lifespan):
                raise PluginError(
                    f"{info}: {HOOK} must return a function that makes an async context manager, "
                    f"or None, not {lifespan!r}."
                )
            lifespans.append((info, lifespan))
        for route in own.routes:
            # Any other kind of route would go round the key check and the body limit.
            if not isinstance(route, kind):
                raise PluginError(
                    f"{info}: {getattr(route, 'path', route)!r} is not a plain HTTP route, the "
                    f"only kind that {HOOK} may add."
                )
            if getattr(route, "replaces", False) and info.name in (names or ()):
                _drop(router, route, of_server)
            _add(router, route, info)

    @asynccontextmanager
    async def together(app: Any) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for info, lifespan in lifespans:
                await stack.enter_async_context(_named(info, lifespan))
            yield

    router.lifespan_context = together


def _add(router: APIRouter, route: APIRoute, info: PluginInfo) -> None:
    """Adds a plugin's route. Raises PluginError where another has its path and one of its
    methods."""
    taken = {
        method
        for other in router.routes
        if getattr(other, "path", None) == route.path
        for method in getattr(other, "methods", None) or ()
    }
    for method in sorted(route.methods or ()):
        if method in taken:
            raise PluginError(f"{info}: the route {method} {route.path} is in use.")
    router.routes.append(route)


def _drop(router: APIRouter, route: APIRoute, of_server: Sequence[BaseRoute]) -> None:
    """Removes the server's own route with the path and the methods of `route`, if there is one."""
    for other in of_server:
        if (
            getattr(other, "path", None) == route.path
            and getattr(other, "methods", None) == route.methods
            and other in router.routes
        ):
            router.routes.remove(other)


def _model_plugin(engine: ServingEngine) -> str | None:
    """The plugin that brings the model's class. None for a class that stands in for others."""
    assert engine.config.checkpoint is not None
    models = engine.plugins.models
    architecture = engine.config.checkpoint.architecture
    return models.get(architecture).plugin if architecture in models else None


@asynccontextmanager
async def _named(info: PluginInfo, lifespan: Lifespan) -> AsyncIterator[None]:
    with info.boundary("the lifespan of its routes"):
        async with lifespan():
            yield
