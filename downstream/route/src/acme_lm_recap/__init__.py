"""Adds the routes of recaps: `toolkit serve --routes recap`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from msgspec import Struct
from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct):
    max_tokens: int = 32
    """Most tokens of a recap."""


@hookimpl
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi
) -> Callable[[], AbstractAsyncContextManager[object]]:
    # Each start of `toolkit` imports this module, and a web framework is heavy.
    from acme_lm_recap.routes import Recaps

    return Recaps(engine, options, api).add_to(router)
