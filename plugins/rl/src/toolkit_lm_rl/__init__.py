"""Reinforcement learning: an engine that pauses, sleeps, and takes new weights. This entry module
only registers it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct
from toolkit_lm.plugin import LogitsProcessorRegistry, PartRegistry, hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option rl.NAME=...`"""

    folder: str | None = None
    """Folder with the weights that operators may load over HTTP. `/dev/shm` is shared memory."""
    weight_transfer: Literal["off", "gloo"] = "off"
    """Way by which a trainer sends weights to a server: none, or a group over TCP that the server
    joins where an operator says, /init_weight_transfer_engine."""
    worker_extension_cls: str | None = None
    """Class whose methods `collective_rpc` calls on each worker, module.Class."""
    hidden_states: list[str | int] | str = []
    """Layers whose hidden states requests may ask for: a list of names or numbers, and `last` for
    the states after the last norm; also with commas."""
    routed_experts: Literal["off", "asked", "always"] = "off"
    """Requests get the experts of their tokens: never, if they ask for them, or always."""
    recorded_mib: Annotated[float, Meta(gt=0)] = 256.0
    """Most MiB of hidden states, and of routed experts, that an engine keeps for its requests."""


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    from toolkit_lm_rl.records import HiddenStatesParams, RoutedExpertsParams

    processors.add("hidden_states", None, params=HiddenStatesParams)
    processors.add("routed_experts", None, params=RoutedExpertsParams)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "rl",
        request="toolkit_lm_rl.front:RlRequests",
        planner="toolkit_lm_rl.planner:RlPlanner",
        worker="toolkit_lm_rl.worker:WeightsPart",
    )
    parts.add(
        "hidden_states",
        request="toolkit_lm_rl.records:HiddenStates",
        planner="toolkit_lm_rl.records_planner:HiddenStatesPlanner",
        worker="toolkit_lm_rl.records_worker:HiddenStatesPart",
        for_model="toolkit_lm_rl.records:records_hidden_states",
    )
    parts.add(
        "routed_experts",
        request="toolkit_lm_rl.records:RoutedExperts",
        planner="toolkit_lm_rl.records_planner:RoutedExpertsPlanner",
        worker="toolkit_lm_rl.records_worker:RoutedExpertsPart",
        for_model="toolkit_lm_rl.records:records_routed_experts",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, options: Options, api: OpenAIApi
) -> None:
    from toolkit_lm_rl.routes import add_routes

    add_routes(router, engine, options, api)
