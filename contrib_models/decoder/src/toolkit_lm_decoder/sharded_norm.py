"""RMSNorm over heads that are spread over the ranks."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.model import Part, ShardLoader, choose_kernels, new_parameter, torch_dtype
from torch import Tensor, nn


class ShardedRMSNorm(nn.Module):
    """RMSNorm over an axis that is split over the ranks: x [T, part.size] -> the same. Ranks may share a part, each as many."""

    def __init__(self, part: Part, *, eps: float, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = choose_kernels()
        self.parallel = vllm_config.parallel
        self.is_sharded = self.parallel.tensor_parallel_size > 1
        self.weight = new_parameter((part.size,), torch_dtype(vllm_config.model.dtype), ShardLoader((part,)))

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_sharded:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        wide = x.float()
        total = tensor_parallel_group(self.parallel).all_reduce(wide.square().mean(-1, keepdim=True))
        scale = torch.rsqrt(total / self.parallel.tensor_parallel_size + self.eps)
        return (wide * scale * self.weight).to(x.dtype)
