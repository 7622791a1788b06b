"""MXFP4: experts in 4-bit floats, of which 32 share an exponent."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from msgspec import Struct
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError
from toolkit_lm.model import LinearSpec
from torch import Tensor

from toolkit_lm_quantization_formats.base import FormatQuantization, is_skipped
from toolkit_lm_quantization_formats.schemes import Nibbles, Scheme

_STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)_(blocks|scales)")
_NAMES = {"blocks": "weight_packed", "scales": "weight_scale"}
GROUP = 32
_AXES = {
    "blocks": ("experts", "outputs", "groups", "16"),
    "scales": ("experts", "outputs", "groups"),
}


class Config(Struct):
    modules_to_not_convert: list[str] | None = None


class Mxfp4(FormatQuantization):
    """The checkpoint holds all experts of a layer in one tensor: blocks [E, N, K / 32, 16] and
    scales [E, N, K / 32], both uint8."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self.parsed = self.parse(Config)
        self.layout = Nibbles(group=GROUP, scale_dtype=torch.uint8)

    def scheme(self, spec: LinearSpec, source: str, tensors: frozenset[str]) -> Scheme | None:
        skipped = self.parsed.modules_to_not_convert or []
        is_quantized = spec.kind == "experts" and not is_skipped(source, skipped)
        return self.layout if is_quantized else None

    def adapt(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().adapt(weights):
            stacked = _STACKED.fullmatch(name)
            if stacked is None:
                yield name, tensor
                continue
            experts, projection, content = stacked.groups()
            axes = _AXES[content]
            if tensor.ndim != len(axes) or (len(axes) == 4 and tensor.shape[3] != GROUP // 2):
                raise CheckpointError(
                    f"{name} has shape {list(tensor.shape)}, not [{', '.join(axes)}]"
                )
            for index, expert in enumerate(tensor):
                codes = expert.flatten(1) if content == "blocks" else expert
                yield f"{experts}.{index}.{projection}.{_NAMES[content]}", codes
