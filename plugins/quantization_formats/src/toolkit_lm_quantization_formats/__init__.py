"""Quantized checkpoints in the formats that people have. This entry module only registers them;
each is imported when a checkpoint names it."""

from toolkit_lm.plugin import QuantizationRegistry, hookimpl

from toolkit_lm_quantization_formats.names import READ, REFUSED


@hookimpl
def toolkit_register_quantization(quantization: QuantizationRegistry) -> None:
    for name, target in READ.items():
        quantization.add(name, f"toolkit_lm_quantization_formats.{target}")
    for name in REFUSED:
        quantization.add(name, "toolkit_lm_quantization_formats.refused:Refused")
