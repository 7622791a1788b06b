"""A third party's quantization of weights: int8 that is made at load."""

from toolkit_lm.plugin import QuantizationRegistry, hookimpl


@hookimpl
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    quantization.add("absmax8", "toolkit_lm_int8.int8:Int8")
