"""AWQ, which AutoAWQ and GPTQModel write."""

from __future__ import annotations

from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import LinearSpec

from toolkit_lm_quantization_formats.base import FormatQuantization, group_of, one_of
from toolkit_lm_quantization_formats.schemes import AwqColumns, Scheme


class Config(Struct):
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None
    zero_point: bool = True
    version: str | None = None
    format: str | None = None
    modules_to_not_convert: list[str] | None = None


class Awq(FormatQuantization):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = config = self.parse(Config)
        one_of("version", (config.version or config.format or "gemm").lower(), ["gemm"])
        one_of(
            "bits",
            4 if config.bits is None and config.w_bit is None else config.bits or config.w_bit,
            [4],
        )
        size = config.group_size if config.group_size is not None else config.q_group_size
        self.layout = AwqColumns(
            group=group_of(128 if size is None else size), symmetric=not config.zero_point
        )

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        if not tensors:
            skipped = [*(self.parsed.modules_to_not_convert or ()), "lm_head"]
            if spec.kind == "embedding" or any(name in source for name in skipped):
                return None
        return self.layout
