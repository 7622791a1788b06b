"""AutoRound, which packs as GPTQ or AWQ do, with bits of its own for some layers."""

from __future__ import annotations

import re

from msgspec import Struct, field
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import LinearSpec
from toolkit_lm_weights.patterns import finds

from toolkit_lm_quantization_formats.base import FormatQuantization, group_of, matched, one_of
from toolkit_lm_quantization_formats.gptq import BITS
from toolkit_lm_quantization_formats.schemes import AwqColumns, PackedColumns, Scheme

_PACKINGS = {
    "auto_round:auto_gptq": "gptq",
    "auto_round:gptq": "gptq",
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "auto_round:auto_awq": "awq",
    "auto_round:awq": "awq",
    "auto_awq": "awq",
    "awq": "awq",
}
_FLOAT_BITS = 16
"""A layer with so many bits is not quantized."""


class Layer(Struct):
    bits: int = 4
    group_size: int = 128
    data_type: str = "int"


class Config(Layer):
    packing_format: str = "auto_round:auto_gptq"
    extra_config: dict[str, dict[str, object]] = field(default_factory=dict)


class AutoRound(FormatQuantization):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = config = self.parse(Config)
        self.packing = _PACKINGS[one_of("packing_format", config.packing_format, _PACKINGS)]
        self._layout(config)

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        if not tensors and spec.kind in ("embedding", "lm_head"):
            return None
        config = self.parsed
        stated: dict[str, object] = {
            "bits": config.bits,
            "group_size": config.group_size,
            "data_type": config.data_type,
        }
        for name, override in config.extra_config.items():
            if name == source or _matches(name, source):
                stated |= {key: value for key, value in override.items() if value is not None}
                break
        return self._layout(self.parse(Layer, stated))

    def _layout(self, layer: Layer) -> Scheme | None:
        if layer.bits >= _FLOAT_BITS:
            return None
        one_of("data_type", layer.data_type, ["int"])
        size = group_of(layer.group_size)
        if self.packing == "awq":
            one_of("bits", layer.bits, [4])
            return AwqColumns(group=size)
        one_of("bits", layer.bits, BITS)
        return PackedColumns(bits=layer.bits, group=size, ordered=False, zero_offset=1)


def _matches(pattern: str, source: str) -> bool:
    """Whether a name is a regular expression, and finds the source."""
    if re.fullmatch(r"[\w.]+", pattern):
        return False
    return matched(finds, "extra_config", pattern, source)
