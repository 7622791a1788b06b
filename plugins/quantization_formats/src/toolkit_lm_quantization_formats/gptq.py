"""GPTQ, which AutoGPTQ, GPTQModel and optimum write."""

from __future__ import annotations

from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import LinearSpec
from toolkit_lm_weights.patterns import begins

from toolkit_lm_quantization_formats.base import FormatQuantization, group_of, matched, one_of
from toolkit_lm_quantization_formats.schemes import PackedColumns, Scheme

BITS = (2, 3, 4, 8)


class Config(Struct):
    bits: int
    group_size: int = 128
    desc_act: bool = False
    lm_head: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    is_marlin_format: bool = False
    dynamic: dict[str, dict[str, object]] | None = None


class Override(Struct):
    bits: int
    group_size: int
    desc_act: bool


class Gptq(FormatQuantization):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = config = self.parse(Config)
        if config.is_marlin_format:
            raise UnsupportedError(
                "quantization_config of config.json: is_marlin_format is a layout of one kernel. "
                "Use the checkpoint that it was made of, or write it with GPTQModel as gptq"
            )
        form = (config.checkpoint_format or config.format or "gptq").lower()
        self.zero_offset = {"gptq": 1, "gptq_v2": 0}[
            one_of("checkpoint_format", form, ["gptq", "gptq_v2"])
        ]
        one_of("bits", config.bits, BITS)
        group_of(config.group_size)

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        config = self.parsed
        if not tensors and (spec.kind == "embedding" or (spec.kind == "lm_head") > config.lm_head):
            return None
        stated: dict[str, object] = {
            "bits": config.bits,
            "group_size": config.group_size,
            "desc_act": config.desc_act,
        }
        for pattern, override in (config.dynamic or {}).items():
            sign = pattern[:2] if pattern[:2] in ("+:", "-:") else ""
            own = pattern.removeprefix(sign)
            if matched(begins, "dynamic", own, source, prefix=sign):
                if pattern.startswith("-:"):
                    return None
                stated |= override
                break
        found = self.parse(Override, stated)
        return PackedColumns(
            bits=one_of("dynamic: bits", found.bits, BITS),
            group=group_of(found.group_size),
            ordered=found.desc_act,
            zero_offset=self.zero_offset,
        )
