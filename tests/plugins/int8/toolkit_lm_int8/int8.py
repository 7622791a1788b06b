"""Weights in int8 with a float32 scale per output channel, made while a checkpoint of floats is
loaded: activations stay floats."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import LinearMethod, LinearSpec, Quantization, ShardLoader, new_parameter
from torch import Tensor, nn
from torch.nn import functional as F


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[outputs, inputs] -> int8 of the same shape, and scales [outputs] float32: weight is about
    int8 * scale.

    Symmetric: the largest value of a row becomes 127, and no value is off by more than half a
    scale.
    """
    weight = weight.float()
    scale = weight.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (weight / scale).round().to(torch.int8), scale.squeeze(-1)


@dataclass(frozen=True)
class QuantizingLoader(ShardLoader):
    """Cuts this rank's share out of the whole quantized weight, so that a row has one scale on all
    ranks."""

    scale: Tensor | None = None
    """Destination of the scales."""
    rows: ShardLoader | None = None
    """Cuts them."""

    def __call__(self, param: Tensor, loaded: Tensor, shard_id: int | None = None) -> None:
        values, scale = quantize(loaded)
        super().__call__(param, values, shard_id)
        assert self.rows is not None and self.scale is not None
        self.rows(self.scale, scale, shard_id)


class Int8Method(LinearMethod):
    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        plain = spec.loader()
        # The right size if nothing is loaded (load_format "dummy"): 127 steps of it are one. It is
        # in no checkpoint.
        self.scale = torch.full(spec.shape[:1], 1 / 127, dtype=torch.float32)
        layer.register_buffer("weight_scale", self.scale, persistent=False)
        loader = QuantizingLoader(plain.shards, plain.dim, self.scale, ShardLoader(spec.outputs))
        self.weight = layer.weight = new_parameter(spec.shape, torch.int8, loader)

    def dequantized(self) -> Tensor:
        return self.weight.float() * self.scale[:, None]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantized().to(x.dtype), bias)


class Int8(Quantization):
    """Linear layers, experts, and heads that are not tied: a tied one is the embedding, which stays
    as it is."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        if vllm_config.hf_config.get("quantization_config"):
            return "its weights are quantized already"
        return None

    def method(self, spec: LinearSpec) -> LinearMethod | None:
        return None if spec.kind == "embedding" or spec.tied_to is not None else Int8Method()
