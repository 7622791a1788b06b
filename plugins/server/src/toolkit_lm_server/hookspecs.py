"""The hook that this plugin brings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.plugin import hookspec

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm.frontend import AsyncLLM


@hookspec
def toolkit_register_routes(router: APIRouter, engine: AsyncLLM) -> None:
    """Adds HTTP routes to the server.

    Caller: `create_router`, once, for the plugins that the option `routes` names and for no others. Process: the server's. Thread: the
    one that makes the app. Return: nothing. Routes get the server's API key check, body limit and error shape. One that raises, adds
    anything but plain HTTP routes, or takes a path that is in use, is fatal.
    """
