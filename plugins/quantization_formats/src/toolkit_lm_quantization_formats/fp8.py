"""FP8: weights in float8 e4m3, with a scale per weight, per output, or per block."""

from __future__ import annotations

from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearSpec

from toolkit_lm_quantization_formats.base import FormatQuantization, is_skipped, one_of
from toolkit_lm_quantization_formats.schemes import Plain, Scheme


class Config(Struct):
    activation_scheme: str = "dynamic"
    weight_block_size: list[int] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    fmt: str = "e4m3"
    expert_dtype: str = "fp8"


class Fp8(FormatQuantization):
    """The scales' name says which tool wrote them, and both multiply."""

    per_output = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = config = self.parse(Config)
        one_of("activation_scheme", config.activation_scheme, ["dynamic", "static"])
        one_of("fmt", config.fmt, ["e4m3"])
        one_of("expert_dtype", config.expert_dtype, ["fp8"])
        block = config.weight_block_size
        if block is not None and (len(block) != 2 or min(block) < 1):
            raise CheckpointError(
                "quantization_config of config.json: weight_block_size must be two sizes, not "
                f"{block}"
            )
        self.rows: int | None = 1 if self.per_output else None
        self.group: int | None = None
        if block is not None:
            self.rows, self.group = block

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        config = self.parsed
        skipped = [*(config.modules_to_not_convert or config.ignored_layers or ()), "lm_head"]
        if not tensors and (spec.kind == "embedding" or is_skipped(source, skipped)):
            return None
        is_inverse = "weight_scale_inv" in tensors or (not tensors and self.group is not None)
        return Plain(
            scale="weight_scale_inv" if is_inverse else "weight_scale",
            rows=self.rows,
            group=self.group,
        )


class FbgemmFp8(Fp8):
    per_output = True
