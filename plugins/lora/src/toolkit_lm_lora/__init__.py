"""LoRA: adapters as PEFT saves them, chosen by each request. This entry module only registers
it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import LogitsProcessorRegistry, PartRegistry, hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_commands import CommandRegistry
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine


class Options(Struct, frozen=True):
    """`--plugin-option lora.NAME=...`"""

    enabled: bool = False
    """Requests may name adapters."""
    modules: list[str] | str = []
    """Adapters of the start: a list of NAME=PATH; also in JSON, or with commas."""
    folder: str | None = None
    """Folder whose folders are adapters, by their names."""
    max_adapters: Annotated[int, Meta(ge=1)] = 8
    """Most adapters that a step may have rows of."""
    max_rank: Annotated[int, Meta(ge=1)] = 256
    """Greatest rank of an adapter."""
    max_host_adapters: Annotated[int, Meta(ge=1)] = 256
    """Most adapters that workers keep in memory."""
    host_gib: Annotated[float, Meta(gt=0)] = 4.0
    """Most GiB of adapters that each worker keeps in memory, beside those that requests run
    with."""
    max_wait_seconds: Annotated[float, Meta(ge=0)] = 0.5
    """Seconds after which a waiting adapter makes others give way."""


class LoraParams(ProcessorParams):
    """Request parameters of adapters."""

    adapter: Annotated[str | None, param("Name of the adapter.", max_length=256)] = None
    adapters: Annotated[
        list[dict[str, Any]] | None,
        param("Adapters that are added: [{'name': ..., 'scale': ...}].", max_items=16),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        from toolkit_lm_lora.enabled import is_enabled, refusal

        if not is_enabled(renderer.config):
            raise refusal("adapters" if self.adapter is None else "adapter")
        return super().prepare(renderer)


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("lora", None, params=LoraParams)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "lora",
        request="toolkit_lm_lora.front:LoraRequests",
        planner="toolkit_lm_lora.planner:LoraPlanner",
        worker="toolkit_lm_lora.worker:LoraPart",
        for_model="toolkit_lm_lora.enabled:is_enabled",
    )
    parts.add(
        "lora_off",
        request="toolkit_lm_lora.enabled:Refusing",
        for_model="toolkit_lm_lora.enabled:is_disabled",
    )


@hookimpl(optionalhook=True)
def toolkit_register_routes(router: APIRouter, engine: ServingEngine, api: OpenAIApi) -> None:
    from toolkit_lm_lora.routes import add_routes

    add_routes(router, engine, api)


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "lora list", "toolkit_lm_lora.cli:list_adapters", help="List the adapters of a folder."
    )
    commands.add(
        "lora merge",
        "toolkit_lm_lora.cli:merge_adapter",
        help="Write a checkpoint with an adapter merged into its weights.",
    )
