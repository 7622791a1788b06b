"""LoRA: each request may name an adapter, a file of the folder that the option names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.plugin import LogitsProcessorRegistry, PartRegistry, hookimpl


class Options(Struct, frozen=True):
    folder: str = "."
    """Has a file NAME.safetensors for each adapter, which may come and go at any time."""
    adapters: tuple[str, ...] = ()
    """Those that are loaded at the start. An app loads others by `call_workers`, by the methods
    "like.load_adapter" and "like.unload_adapter"."""
    num_slots: int = 2
    """Adapters that a step may have rows of."""


class LoraParams(ProcessorParams):
    """Request parameters of the adapter."""

    like: Annotated[str | None, param("Name of the adapter.", max_length=64)] = None


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("like", None, params=LoraParams)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "like",
        request="toolkit_lm_lora_like.front:LoraRequests",
        planner="toolkit_lm_lora_like.planner:LoraPlanner",
        worker="toolkit_lm_lora_like.worker:LoraPart",
    )
