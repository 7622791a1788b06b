"""A third party's quantizations of weights: int8 that is made at load, and the packed int4 of
compressed-tensors' checkpoints."""

from toolkit_lm.plugin import QuantizationRegistry, hookimpl


@hookimpl
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    quantization.add("int8", "toolkit_lm_int8.int8:Int8")
    quantization.add("compressed-tensors", "toolkit_lm_int8.packed:CompressedTensors")
