"""Fused layers: decoder layers of the usual kind, which kernels may compute in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from toolkit_lm.model.kernels import FusedLayer
from toolkit_lm.model.linear import GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from toolkit_lm.model.norm import RMSNorm
from toolkit_lm.model.rotary import Rotation

if TYPE_CHECKING:
    from toolkit_lm.attention import Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """x + residual -> input_norm -> qkv -> head_norms -> rotation -> attn -> out; + residual -> post_norm -> gate_up -> down."""

    input_norm: RMSNorm
    qkv: QKVParallelLinear
    head_norms: tuple[RMSNorm, RMSNorm] | None
    """Of each head of queries and of keys."""
    attn: Attention
    out: RowParallelLinear
    post_norm: RMSNorm
    gate_up: GatedColumnParallelLinear
    down: RowParallelLinear


class FusibleLayer(nn.Module):
    """A layer that kernels may fuse, once its weights are loaded."""

    fused: FusedLayer | None = None
    """What computes the layer in place of its modules."""

    def parts(self) -> LayerParts | None:
        """None: it is of another kind."""
        raise NotImplementedError

    def __call__(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if self.fused is not None and (done := self.fused(x, residual, rotation)) is not None:
            return done
        out: tuple[Tensor, Tensor] = super().__call__(x, residual, rotation)
        return out
