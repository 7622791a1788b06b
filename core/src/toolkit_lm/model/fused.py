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
from toolkit_lm.model.linear import GatedColumnParallelLinear, LinearBase, RowParallelLinear
from toolkit_lm.model.linear_method import LinearMethod
from toolkit_lm.model.norm import RMSNorm
from toolkit_lm.model.rotary import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """x + residual -> input_norm -> qkv -> head_norms -> rotation -> attn -> out; + residual ->
    post_norm -> gate_up -> down.

    That is the usual kind of layer. Its parts state how another kind differs. Kernels refuse parts
    that they do not support.
    """

    input_norm: RMSNorm | None
    """None: qkv takes the sum without a norm."""
    qkv: LinearBase
    """Its outputs are queries, keys and values. Without values, these are the keys before norm and
    rotation. Queries alone: `attn` reads the keys and values of the layer that it shares with."""
    head_norms: tuple[RMSNorm, ...] | None
    """Norms of queries and, if there are any, of keys: of each head, or, if the weights are as long
    as all heads, of these together."""
    attn: Attention
    out: RowParallelLinear
    post_norm: RMSNorm | None
    """None: the feed-forward takes the sum without a norm."""
    gate_up: GatedColumnParallelLinear | None
    down: RowParallelLinear | None
    feed_forward: nn.Module | None = None
    """[T, H] -> [T, H], in place of gate_up and down, which are then None: for instance routed
    experts. It is called as a module."""
    multiplier: float = 1.0
    """Factor of the outputs of `out` and `down`."""
    out_norms: tuple[RMSNorm, RMSNorm] | None = None
    """Norms of the outputs of `out` and `down`, times the multiplier, before they are added to the
    residual."""
    value_norm: RMSNorm | None = None
    """Norm of each head's values."""
    scalar: nn.Parameter | None = None
    """Factor [1] of the sum at the layer's end. The layer then returns the sum, and None as the
    residual."""
    gate: tuple[LinearBase, LinearBase, RMSNorm] | None = None
    """Layers a and b, and a norm: norm(b(f(a(sum)) * embedding)) is added to the sum before the
    scalar, where f is the activation of gate_up. The layer is called with the embedding [T, inputs
    of b] after the rotation."""

    def methods(self) -> tuple[LinearMethod, ...]:
        """The linear methods of the layer's linear layers."""
        layers = self.qkv, self.out, self.gate_up, self.down, *(self.gate or ())
        return tuple(layer.method for layer in layers if isinstance(layer, LinearBase))

    def refusal(self) -> str | None:
        """Returns why kernels may not replace one of the parts; None: they may."""
        *products, gate_norm = self.gate or (None,)
        norms = self.input_norm, self.post_norm, *(self.head_norms or ()), *(self.out_norms or ())
        parts: list[tuple[nn.Module | None, type[nn.Module]]] = [
            *((product, LinearBase) for product in (self.qkv, *products)),
            (self.attn, Attention),
            (self.out, RowParallelLinear),
            (self.gate_up, GatedColumnParallelLinear),
            (self.down, RowParallelLinear),
            *((norm, RMSNorm) for norm in (*norms, self.value_norm, gate_norm)),
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

    A class that states `seams` in its body guarantees that its forward pass is what its `parts`
    say. Its subclasses are fused too, unless they override anything but seams. If the layer or a
    module in it has a hook, the modules are called.
    """

    fused: FusedLayer | None = None
    """Function that computes the layer in place of its modules, or None."""
    _fused_parts: LayerParts | None = None
    """The parts that `fused` was made of."""
    _fused_methods: tuple[LinearMethod, ...] = ()
    """Linear methods at the time of fusing. A method may be wrapped later."""

    def parts(self) -> LayerParts | None:
        """Returns the layer's parts. None: LayerParts cannot describe the layer."""
        raise NotImplementedError

    def fusible(self) -> LayerParts | str:
        """Returns the parts that kernels may compute in place of the modules, or the reason for
        which they may not."""
        # First, since the parts of a layer with its own forward pass mean nothing.
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
        """Makes `kernels` compute the layer in one call, if the layer allows it and they can."""
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
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, *own: Any
    ) -> tuple[Tensor, Any]:
        """`own`: further inputs of the layer's kind."""
        if (
            self.fused is not None
            and not torch.compiler.is_compiling()
            and type(rotation) is Rotation
        ):
            # Inlines `may_bypass`, to save a call per layer and step.
            is_free = self._seen == RemovableHandle.next_id or self.may_bypass()
            if is_free and (done := self.fused(x, residual, rotation, *own)) is not None:
                return done
        out: tuple[Tensor, Any] = super().__call__(x, residual, rotation, *own)
        return out


def fuse_refusal(kernels: Kernels) -> str | None:
    """Returns why kernels fuse no layer at all; None: they fuse the layers that they can.

    A subclass that overrides an operation of a layer must define `fuse` as well: the inherited one
    does not know the override.
    """
    kind: type[Any] = next(cls for cls in type(kernels).__mro__ if "fuse" in vars(cls))
    return "they have none" if kind is Kernels else alteration(kernels, kind, Kernels.seams)
