"""A router in front of several servers: the command `toolkit route`. The part in a server computes
what another one has begun, and tells its engine of prompts as routers see them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.errors import PluginError
from toolkit_lm.plugin import LogitsProcessorRegistry, hookimpl
from toolkit_lm_commands import CommandRegistry

from toolkit_lm_router.params import BegunParams

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_serving.engine import ServingEngine


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("begun", "toolkit_lm_router.begun:Begun", params=BegunParams)


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "route",
        "toolkit_lm_router.cli:route",
        help="Route requests to several servers that speak OpenAI's API.",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, engine: ServingEngine) -> None:
    """Adds no route: an engine that publishes KV events is told of prompts as routers see them."""
    try:
        options = engine.plugins.options("kv_events")
    except PluginError:
        return
    if getattr(options, "enabled", False):
        from toolkit_lm_router.described import describe_in

        describe_in(router)
