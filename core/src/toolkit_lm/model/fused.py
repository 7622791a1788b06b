"""Fused layers: decoder layers of known kinds, which kernels may compute in one call."""

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
    """x + residual -> input_norm -> qkv -> head_norms -> rotation -> attn -> out; + residual -> post_norm -> gate_up -> down.

    That is the usual kind. What makes a layer another kind is stated by its parts: kernels refuse those that they do not compute.
    """

    input_norm: RMSNorm | None
    """None: qkv takes the sum as it is."""
    qkv: QKVParallelLinear
    head_norms: tuple[RMSNorm, RMSNorm] | None
    """Of queries and of keys: of each head, or, with weights as long as all heads, of these together."""
    attn: Attention
    out: RowParallelLinear
    post_norm: RMSNorm | None
    """None: the feed-forward takes the sum as it is."""
    gate_up: GatedColumnParallelLinear | None
    down: RowParallelLinear | None
    feed_forward: nn.Module | None = None
    """[T, H] -> [T, H], in place of gate_up and down, which are None then: routed experts, say."""
    multiplier: float = 1.0
    """Of what out and down give."""
    out_norms: tuple[RMSNorm, RMSNorm] | None = None
    """Of what out and down give, times the multiplier, before it is added to the residual."""


class FusibleLayer(nn.Module):
    """A layer that kernels may fuse, once its weights are loaded."""

    fused: FusedLayer | None = None
    """What computes the layer in place of its modules."""

    def parts(self) -> LayerParts | None:
        """None: LayerParts cannot state what the layer computes."""
        raise NotImplementedError

    def __call__(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        if self.fused is not None and (done := self.fused(x, residual, rotation)) is not None:
            return done
        out: tuple[Tensor, Tensor] = super().__call__(x, residual, rotation)
        return out
