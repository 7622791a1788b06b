"""LoRA: adapters as PEFT saves them, chosen by each request. This entry module only registers
it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import EventListener, LogitsProcessorRegistry, PartRegistry, hookimpl

from toolkit_lm_lora import hookspecs

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.model import Model
    from toolkit_lm_commands import CommandRegistry, FlagNamesRegistry
    from toolkit_lm_server.plugin_routes import OpenAIApi
    from toolkit_lm_serving.engine import ServingEngine

    from toolkit_lm_lora.resolvers import AdapterResolverRegistry


class Options(Struct, frozen=True):
    """`--plugin-option lora.NAME=...`"""

    enabled: bool = False
    """Requests may name adapters."""
    modules: list[str] | str = []
    """Adapters of the start: a list of NAME=PATH; also in JSON, or with commas."""
    folder: str | None = None
    """Folder whose folders are adapters, by their names."""
    max_adapters: Annotated[int, Meta(ge=1)] = 8
    """Most adapters that a step may have rows of. Where requests run with more, these take
    turns."""
    max_rank: Annotated[int, Meta(ge=1)] = 256
    """Greatest rank of an adapter."""
    max_host_adapters: Annotated[int, Meta(ge=1)] = 256
    """Most adapters that workers keep in memory."""
    host_gib: Annotated[float, Meta(gt=0)] = 4.0
    """Most GiB of adapters that each worker keeps in memory, beside those that requests run
    with."""
    device_gib: Annotated[float, Meta(gt=0)] | None = None
    """Most GiB of the adapters that a step may have rows of. None: no bound but max_adapters."""
    max_file_gib: Annotated[float, Meta(gt=0)] = 16.0
    """Most GiB of an adapter's file of weights. A larger one is refused before it is read."""
    pinned: list[str] | str = []
    """Names of adapters that stay in memory once they are read: a list; also in JSON, or with
    commas."""
    modalities: list[str] | str = []
    """Adapters of requests that have items of media and name no adapter: a list of MODALITY=NAME,
    such as audio=asr; also in JSON, or with commas."""
    merge: list[str] | str = []
    """Adapters to merge into the weights at the start: a list of FOLDER or FOLDER=SCALE; also in
    JSON, or with commas."""
    merge_dir: str | None = None
    """Folder for merged checkpoints. None: `toolkit_lm/merged` in the user's cache folder."""
    merge_gib: Annotated[float, Meta(ge=0)] = 64.0
    """Most GiB of merged checkpoints that are kept."""


class LoraParams(ProcessorParams):
    """Request parameters of adapters."""

    adapter: Annotated[str | None, param("Name of the adapter.", max_length=256)] = None
    adapters: Annotated[
        list[dict[str, Any]] | None,
        param("Adapters that are added: [{'name': ..., 'scale': ...}].", max_items=16),
    ] = None
    lora: Annotated[
        list[dict[str, Any]] | None,
        param(
            "The same as llama.cpp has it, by numbers of /lora-adapters: [{'id': ..., "
            "'scale': ...}].",
            max_items=16,
        ),
    ] = None
    lora_path: Annotated[
        str | None, param("Name of the adapter, as SGLang has it.", max_length=256)
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        from toolkit_lm_lora.enabled import is_enabled, refusal

        if not is_enabled(renderer.config):
            for name in ("adapter", "adapters", "lora", "lora_path"):
                if getattr(self, name):
                    raise refusal(name)
            return None
        return super().prepare(renderer)


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_adapter_resolvers(resolvers: AdapterResolverRegistry) -> None:
    resolvers.add("folder", "toolkit_lm_lora.resolvers:FolderResolver")


@hookimpl(optionalhook=True)
def toolkit_register_flag_names(flag_names: FlagNamesRegistry) -> None:
    flag_names.add("lora", "toolkit_lm_lora.flags:translate_flags")


@hookimpl
def toolkit_configure(config: VllmConfig, options: Options) -> VllmConfig | None:
    if not options.merge:
        return None
    from toolkit_lm_lora.merged import merged

    return merged(config, options)


@hookimpl
def toolkit_watch(config: VllmConfig) -> EventListener | None:
    from toolkit_lm_lora.enabled import is_enabled
    from toolkit_lm_lora.usage import UsageListener

    return UsageListener() if is_enabled(config) else None


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
def toolkit_register_routes(
    router: APIRouter, engine: ServingEngine, api: OpenAIApi
) -> Callable[[], AbstractAsyncContextManager[object]] | None:
    from toolkit_lm_lora.routes import add_routes

    return add_routes(router, engine, api)


@hookimpl(optionalhook=True)
def toolkit_explain(
    config: VllmConfig, models: Sequence[Model], options: Options
) -> Mapping[str, Sequence[str]] | None:
    from toolkit_lm_lora.enabled import is_enabled

    if not is_enabled(config):
        return None
    from toolkit_lm_lora.explaining import explain

    return explain(config, models, options)


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
