"""Refuses checkpoints of formats that are not read, with the tool that converts them."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import LinearMethod, LinearSpec, Quantization

from toolkit_lm_quantization_formats.names import REFUSED


class Refused(Quantization):
    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        stated = vllm_config.hf_config.get("quantization_config")
        if not stated:
            return "its weights are not quantized, and this is a format of quantized checkpoints"
        method = stated.get("quant_method")
        tool = REFUSED.get(str(method), "Convert it to a format that is read")
        return f"no reader of the format {method!r} is here. {tool}"

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        raise AssertionError("it refuses all checkpoints")
