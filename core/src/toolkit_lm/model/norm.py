"""Norms over the last axis, in the kernels of the model."""

from __future__ import annotations

from typing import Any, overload

from torch import Tensor, nn

from toolkit_lm.bypass import Bypassable
from toolkit_lm.config import VllmConfig
from toolkit_lm.model.kernels import choose_kernels
from toolkit_lm.model.parameters import Shard, ShardLoader, new_parameter, torch_dtype


class RMSNorm(Bypassable):
    """weight * x / rms(x) over the last axis, of length `size`. The mean of squares is computed in
    float32.

    With a residual, `norm(x, residual)` returns the norm of x + residual, and the sum, which is the
    next residual.
    """

    seams = frozenset()

    def __init__(self, size: int, *, eps: float, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.eps = eps
        self.kernels = choose_kernels()
        self.weight = new_parameter(
            (size,), torch_dtype(vllm_config.model.dtype), ShardLoader((Shard.whole(size),))
        )

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class LayerNorm(nn.LayerNorm):
    """weight * (x - mean) / deviation + bias over the last axis, of length `size`. `options` are
    those of torch's."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, **options)
        self.kernels = choose_kernels()

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.normalized_shape, self.eps)
