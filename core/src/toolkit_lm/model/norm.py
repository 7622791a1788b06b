"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

from typing import overload

from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.config import VllmConfig
from toolkit_lm.model.parameters import Part, ShardLoader, new_parameter, torch_dtype


class RMSNorm(nn.Module):
    """weight * x / rms(x) over the last axis, of length `size`. The mean of squares is taken in float32.

    With a residual: `norm(x, residual)` gives the norm of x + residual, and the sum, which is the next residual.
    """

    def __init__(self, size: int, *, eps: float, vllm_config: VllmConfig) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (size,)
        self.weight = new_parameter(self.shape, torch_dtype(vllm_config.model.dtype), ShardLoader((Part.whole(size),)))

    @overload
    def forward(self, x: Tensor) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...
    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return self.normalize(x)
        residual = x + residual
        return self.normalize(residual), residual

    def normalize(self, x: Tensor) -> Tensor:
        """The norm itself, which kinds of RMSNorm override."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, eps={self.eps}"
