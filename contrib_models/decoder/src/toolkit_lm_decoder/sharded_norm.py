"""RMSNorm over heads that are spread over the ranks."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.model import RMSNorm, Shard, ShardLoader, new_parameter, torch_dtype
from torch import Tensor


def norm_of_shard(shard: Shard, *, eps: float, vllm_config: VllmConfig) -> RMSNorm:
    """RMSNorm over an axis of which this rank has a shard: one rank alone has it whole."""
    if vllm_config.parallel.tensor_parallel_size > 1:
        return ShardedRMSNorm(shard, eps=eps, vllm_config=vllm_config)
    return RMSNorm(shard.size, eps=eps, vllm_config=vllm_config)


class ShardedRMSNorm(RMSNorm):
    """RMSNorm over an axis that is split over the ranks: x [..., shard.size] -> the same. Ranks may
    share a shard, each as many."""

    def __init__(self, shard: Shard, *, eps: float, vllm_config: VllmConfig) -> None:
        super().__init__(shard.size, eps=eps, vllm_config=vllm_config)
        self.parallel = vllm_config.parallel
        self.weight = new_parameter(
            (shard.size,), torch_dtype(vllm_config.model.dtype), ShardLoader((shard,))
        )

    # Queries and keys have no residual.
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        wide = x.float()
        total = tensor_parallel_group(self.parallel).all_reduce(
            wide.square().mean(-1, keepdim=True)
        )
        scale = torch.rsqrt(total / self.parallel.tensor_parallel_size + self.eps)
        return (wide * scale * self.weight).to(x.dtype)
