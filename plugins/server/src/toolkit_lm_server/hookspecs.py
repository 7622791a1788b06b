"""The hook that this plugin brings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

from toolkit_lm.plugin import hookspec

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_server.plugin_routes import OpenAIApi


@hookspec
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Any, api: OpenAIApi
) -> Callable[[], AbstractAsyncContextManager[object]] | None:
    """Adds HTTP routes to the server.

    `options` are the plugin's own: an instance of its `Options`, or None where it has none. `api`
    answers chats like the server's own routes, for routes that translate to them.

    Caller: `create_router`, once, for the plugins that the option `routes` names, and the one whose
    model is served. Process: the server's. Thread: the one that makes the app.

    Return: None, or the lifespan of the routes, a function that makes an async context manager. It
    is entered before the routes are served, and left when the last request has ended.

    Routes get the server's API key check, body limit and error shape. An implementation is fatal
    that raises, adds anything but plain HTTP routes, or takes a path in use.
    """
