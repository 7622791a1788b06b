"""Reinforcement learning: an engine that pauses, sleeps, and takes new weights. This entry module
only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from toolkit_lm.plugin import PartRegistry, hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option rl.NAME=...`"""

    folder: str | None = None
    """Folder with the weights that operators may load over HTTP. `/dev/shm` is shared memory."""
    worker_extension_cls: str | None = None
    """Class whose methods `collective_rpc` calls on each worker, module.Class."""


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "rl",
        request="toolkit_lm_rl.front:RlRequests",
        planner="toolkit_lm_rl.planner:RlPlanner",
        worker="toolkit_lm_rl.worker:WeightsPart",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi
) -> None:
    from toolkit_lm_rl.routes import add_routes

    add_routes(router, engine, options, api)
