"""GGUF files: checkpoints of one file, with config, tokenizer and weights in it, which are read and
written. This entry module only registers the classes; each is imported when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from toolkit_lm.plugin import LoaderRegistry, QuantizationRegistry, hookimpl
from toolkit_lm_weights.registry import CheckpointWriterRegistry

if TYPE_CHECKING:
    from toolkit_lm_commands import CommandRegistry


@hookimpl
def toolkit_register_loaders(loaders: LoaderRegistry) -> None:
    target = "toolkit_lm_gguf.loader:GGUFLoader"
    loaders.add("gguf", target, reads=("*.gguf",), quantization="gguf")


@hookimpl
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    quantization.add("gguf", "toolkit_lm_gguf.quantization:GGUFQuantization")


@hookimpl(optionalhook=True)
def toolkit_register_checkpoint_writers(writers: CheckpointWriterRegistry) -> None:
    writers.add("gguf", "toolkit_lm_gguf.writer:GGUFWriter")


@hookimpl(optionalhook=True)
def toolkit_register_commands(commands: CommandRegistry) -> None:
    commands.add(
        "lora convert",
        "toolkit_lm_gguf.adapter:convert_adapter",
        help="Write an adapter of llama.cpp as PEFT saves it.",
    )
