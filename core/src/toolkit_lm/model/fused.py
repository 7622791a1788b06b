"""Fused layers: decoder layers of known kinds, which kernels may compute in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from toolkit_lm.attention import Attention
from toolkit_lm.bypass import Bypassable, alteration, module_alteration
from toolkit_lm.model.kernels import FusedLayer, Kernels
from toolkit_lm.model.linear import GatedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from toolkit_lm.model.linear_method import LinearMethod
from toolkit_lm.model.norm import RMSNorm
from toolkit_lm.model.rotary import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """x + residual -> input_norm -> qkv -> head_norms -> rotation -> attn -> out; + residual ->
    post_norm -> gate_up -> down.

    That is the usual kind. What makes a layer another kind is stated by its parts: kernels refuse
    those that they do not compute.
    """

    input_norm: RMSNorm | None
    """None: qkv takes the sum as it is."""
    qkv: QKVParallelLinear
    head_norms: tuple[RMSNorm, RMSNorm] | None
    """Of queries and of keys: of each head, or, with weights as long as all heads, of these
    together."""
    attn: Attention
    out: RowParallelLinear
    post_norm: RMSNorm | None
    """None: the feed-forward takes the sum as it is."""
    gate_up: GatedColumnParallelLinear | None
    down: RowParallelLinear | None
    feed_forward: nn.Module | None = None
    """[T, H] -> [T, H], in place of gate_up and down, which are None then: routed experts, say. It
    is called as a module."""
    multiplier: float = 1.0
    """Of what out and down give."""
    out_norms: tuple[RMSNorm, RMSNorm] | None = None
    """Of what out and down give, times the multiplier, before it is added to the residual."""

    def methods(self) -> tuple[LinearMethod, ...]:
        """Of its linear layers."""
        layers = self.qkv, self.out, self.gate_up, self.down
        return tuple(layer.method for layer in layers if layer is not None)

    def refusal(self) -> str | None:
        """Why kernels may not compute in place of one of the parts; None: they may."""
        if self.attn.shares_with is not None:
            return f"it reads the KV cache of {self.attn.shares_with}"
        norms = self.input_norm, self.post_norm, *(self.head_norms or ()), *(self.out_norms or ())
        parts: list[tuple[nn.Module | None, type[nn.Module]]] = [
            (self.qkv, QKVParallelLinear),
            (self.attn, Attention),
            (self.out, RowParallelLinear),
            (self.gate_up, GatedColumnParallelLinear),
            (self.down, RowParallelLinear),
            *((norm, RMSNorm) for norm in norms),
        ]
        for part, kind in parts:
            if part is None:
                continue
            if not isinstance(part, kind):
                return f"{type(part).__name__} is no {kind.__name__}"
            if (why := module_alteration(part)) is not None:
                return why
        return None


class FusibleLayer(Bypassable):
    """A layer that kernels may fuse, once its weights are loaded.

    A class that states `seams` in its body vouches that its forward pass is what its `parts` say.
    Its subclasses are fused too, unless they override anything but seams. While a hook hangs on the
    layer or on a module in it, the modules are called.
    """

    fused: FusedLayer | None = None
    """What computes the layer in place of its modules."""
    _fused_parts: LayerParts | None = None
    """What `fused` was made of."""
    _fused_methods: tuple[LinearMethod, ...] = ()
    """Those of their linear layers then: one may be wrapped later."""

    def parts(self) -> LayerParts | None:
        """None: LayerParts cannot state what the layer computes."""
        raise NotImplementedError

    def fusible(self) -> LayerParts | str:
        """What kernels may compute in place of the layer's modules, or why they may not."""
        # First, since the parts of a layer that computes in its own way mean nothing.
        if (why := module_alteration(self)) is not None:
            return why
        if (parts := self.parts()) is None:
            return f"{type(self).__name__} is of no kind that kernels know"
        called = set() if parts.feed_forward is None else set(parts.feed_forward.modules())
        for module in self.modules():
            if module not in called and (why := module_alteration(module)) is not None:
                return why
        return parts.refusal() or parts

    def fuse(self, kernels: Kernels) -> None:
        """Lets `kernels` compute the layer in one call, where it may and they can."""
        self.fused = self._fused_parts = None
        found = self.fusible()
        if isinstance(found, LayerParts) and fuse_refusal(kernels) is None:
            self.fused = kernels.fuse(found)
            self._fused_parts = found
            self._fused_methods = found.methods()

    def refuses_bypass(self) -> str | None:
        found = self.fusible()
        if isinstance(found, str):
            return found
        if found != self._fused_parts:
            return "its parts are others than those that were fused"
        for now, then in zip(found.methods(), self._fused_methods, strict=True):
            if now is not then:
                return f"a linear layer has the method {type(now).__name__} since it was fused"
        return None

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        if (
            self.fused is not None
            and not torch.compiler.is_compiling()
            and type(rotation) is Rotation
        ):
            # The comparison is that of `may_bypass`, without a call at each layer of each step.
            is_free = self._seen == RemovableHandle.next_id or self.may_bypass()
            if is_free and (done := self.fused(x, residual, rotation)) is not None:
                return done
        out: tuple[Tensor, Tensor] = super().__call__(x, residual, rotation)
        return out


def fuse_refusal(kernels: Kernels) -> str | None:
    """Why kernels fuse no layer at all; None: they fuse those that they can.

    A subclass that overrides an operation of a layer has to define `fuse` as well: the one that it
    inherits does not know.
    """
    kind: type[Any] = next(cls for cls in type(kernels).__mro__ if "fuse" in vars(cls))
    return "they have none" if kind is Kernels else alteration(kernels, kind, Kernels.seams)
