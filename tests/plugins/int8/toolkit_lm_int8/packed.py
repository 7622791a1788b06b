"""The format "pack-quantized" of compressed-tensors: symmetric int4 or int8, several in an int32,
with a scale per group of inputs."""

from __future__ import annotations

import re
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import LinearMethod, LinearSpec, Quantization, new_parameter
from torch import Tensor, nn
from torch.nn import functional as F

_FORMAT = "pack-quantized"


class PackedMethod(LinearMethod):
    """`weight_packed` [outputs, inputs / values in an int32] int32, `weight_scale` [outputs, inputs
    / group size], `weight_shape` [2]."""

    def __init__(self, num_bits: int, group_size: int) -> None:
        self.num_bits = num_bits
        self.group_size = group_size

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        pack = 32 // self.num_bits
        # As many groups as the share's inputs are in: ranks may have to share one.
        packed, grouped = (
            spec.inputs.stored(f"inputs of {spec.prefix}", pack=p, group=g)
            for p, g in ((pack, 1), (1, self.group_size))
        )
        self.spec = spec
        outputs = spec.shape[0]
        self.weight = layer.weight_packed = new_parameter(
            (outputs, packed.size), torch.int32, spec.loader(pack=pack)
        )
        self.scale = layer.weight_scale = new_parameter(
            (outputs, grouped.size), spec.dtype, spec.loader(group=self.group_size)
        )
        layer.weight_shape = new_parameter((2,), torch.int64, _pass_over)
        layer.weight_shape.data.zero_()

    def process(self, layer: nn.Module) -> None:
        del layer.weight_shape

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantized().to(x.dtype), bias)

    def dequantized(self) -> Tensor:
        shifts = torch.arange(0, 32, self.num_bits, dtype=torch.int32, device=self.weight.device)
        values = (self.weight.unsqueeze(-1) >> shifts) & ((1 << self.num_bits) - 1)
        size = self.spec.inputs.size
        start = self.spec.inputs.start % self.group_size
        # A share that begins within a group begins within the scales that are stored for it.
        scales = self.scale.float().repeat_interleave(self.group_size, dim=1)[
            :, start : start + size
        ]
        return (values.flatten(1)[:, :size] - (1 << (self.num_bits - 1))) * scales


def _pass_over(param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
    """The shape is known."""


class CompressedTensors(Quantization):
    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        config = vllm_config.hf_config.get("quantization_config") or {}
        groups = list((config.get("config_groups") or {}).values())
        if config.get("format") != _FORMAT or len(groups) != 1:
            return (
                f"it has the format {config.get('format')!r} in {len(groups)} groups of layers, "
                f"and not {_FORMAT!r} in one"
            )
        weights = groups[0].get("weights") or {}
        if groups[0].get("targets") != ["Linear"] or groups[0].get("input_activations"):
            return "it quantizes other things than the weights of linear layers"
        wanted = {"type": "int", "symmetric": True, "strategy": "group"}
        if wrong := [
            f"{key} {weights.get(key)!r}"
            for key, value in wanted.items()
            if weights.get(key) != value
        ]:
            return f"its weights are stored with {', '.join(wrong)}"
        if weights.get("num_bits") not in (4, 8) or not weights.get("group_size"):
            return (
                f"its weights have {weights.get('num_bits')} bits, in groups of "
                f"{weights.get('group_size')}"
            )
        return None

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        (group,) = self.config["config_groups"].values()
        weights: dict[str, Any] = group["weights"]
        if spec.kind == "embedding" or spec.tied_to is not None:
            return None
        ignored = [
            any(self._names(source, name) for name in self.config["ignore"])
            for source in spec.sources or (spec.prefix,)
        ]
        if any(ignored):
            if not all(ignored):
                raise UnsupportedError(
                    f"{spec.prefix}: of {', '.join(spec.sources)} some are quantized and some are "
                    "not, and one layer holds them."
                )
            return None
        return PackedMethod(weights["num_bits"], weights["group_size"])

    def _names(self, source: str, ignored: str) -> bool:
        return (
            bool(re.match(ignored.removeprefix("re:"), source))
            if ignored.startswith("re:")
            else ignored == source
        )
