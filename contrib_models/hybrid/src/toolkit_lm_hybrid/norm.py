"""Norms with a gate."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.model import (
    Shard,
    ShardLoader,
    choose_kernels,
    get_activation,
    new_parameter,
    torch_dtype,
)
from torch import Tensor, nn


class GatedRMSNorm(nn.Module):
    """RMSNorm over pieces of `group` dimensions, in float32, and a gate that `activation` makes g
    of: weight * rms_norm(x) * g, or with `gate_first` weight * rms_norm(x * g)."""

    def __init__(
        self,
        shard: Shard,
        *,
        group: int,
        eps: float,
        gate_first: bool = False,
        activation: str = "silu",
        vllm_config: VllmConfig,
    ) -> None:
        super().__init__()
        self.kernels = choose_kernels()
        self.group = group
        self.eps = eps
        self.gate_first = gate_first
        self.activation = get_activation(activation)
        self.parallel = vllm_config.parallel
        # A group that ranks share needs the sum of all their squares.
        self.is_shared = group > shard.size
        self.dtype = torch_dtype(vllm_config.model.dtype)
        self.weight = new_parameter((shard.size,), self.dtype, ShardLoader((shard,)))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """x and gate [..., size] -> the same, in the model's dtype."""
        x = x.float()
        gate = self.activation(gate.float())
        if self.gate_first:
            x = x * gate
        if not self.is_shared and self.group >= x.shape[-1]:
            x = self.kernels.rms_norm(x, self.weight.float(), self.eps)
            return (x if self.gate_first else x * gate).to(self.dtype)
        pieces = x.view(*x.shape[:-1], -1, min(self.group, x.shape[-1]))
        squares = pieces.square().sum(-1, keepdim=True)
        if self.is_shared:
            squares = tensor_parallel_group(self.parallel).all_reduce(squares)
        scale = torch.rsqrt(squares / self.group + self.eps)
        x = (pieces * scale).flatten(-2) * self.weight.float()
        return (x if self.gate_first else x * gate).to(self.dtype)
