"""Quantization of weights of floats: while they are loaded, or into a new checkpoint. This entry
module only registers it."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from toolkit_lm.plugin import QuantizationRegistry, hookimpl

from toolkit_lm_quantize import hookspecs

if TYPE_CHECKING:
    from toolkit_lm_commands import CommandRegistry
    from toolkit_lm_weights.registry import CheckpointWriterRegistry


class Options(Struct, frozen=True):
    """`--plugin-option quantize.NAME=...`"""

    cache: bool = True
    """Keep what was quantized at load for the next start."""
    cache_dir: str | None = None
    """Folder of the cache. None: `toolkit_lm/quantized` in the user's cache folder."""
    cache_gib: Annotated[float, Meta(ge=0)] = 32.0
    """Most GiB that the cache may have. Entries that were not used for longest go first."""


@hookimpl
def toolkit_register_hookspecs() -> ModuleType:
    return hookspecs


@hookimpl
def toolkit_register_checkpoint_writers(writers: CheckpointWriterRegistry) -> None:
    target = "toolkit_lm_quantize.compressed_tensors:CompressedTensorsWriter"
    writers.add("compressed-tensors", target)


@hookimpl
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    for name in ("int8", "int4", "fp8"):
        quantization.add_at_load(name, f"toolkit_lm_quantize.at_load:{name.capitalize()}")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "quality",
        "toolkit_lm_quantize.cli:quality",
        help="Measure how far a quantized model is from its original.",
    )
    commands.add(
        "quantize",
        "toolkit_lm_quantize.cli:quantize",
        help="Write a checkpoint, quantized, in a format that other projects read, too.",
    )
