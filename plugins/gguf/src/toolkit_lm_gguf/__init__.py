"""GGUF files: checkpoints of one file, with config, tokenizer and weights in it, which are read and
written. This entry module only registers the classes; each is imported when it is used."""

from toolkit_lm.plugin import LoaderRegistry, QuantizationRegistry, hookimpl
from toolkit_lm_weights.registry import CheckpointWriterRegistry


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
