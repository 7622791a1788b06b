"""PanelLinear: a linear method whose weight lies as the kernels read it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from toolkit_lm.model import GatedColumnParallelLinear, UnquantizedMethod
from torch import Tensor, nn

from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.library import _kernels, product_type

LANES = 16
"""Outputs of a panel."""
ACTIVATIONS: Mapping[str | None, int] = {
    None: 0,
    "relu": 1,
    "silu": 2,
    "swish": 2,
    "gelu": 3,
    "gelu_python": 3,
    "gelu_accurate": 4,
    "gelu_fast": 4,
    "gelu_new": 4,
    "gelu_pytorch_tanh": 4,
    "quick_gelu": 5,
}
"""Their numbers in product.h."""


class PanelLinear(UnquantizedMethod):
    """A weight in panels of 16 outputs. A row's result is one sum in order, whatever is computed beside it."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.packed: Tensor | None = None
        self.is_halved = False
        """Its gate and what passes it have panels of their own, since a panel would hold outputs of both."""

    def process(self, layer: nn.Module) -> None:
        weight = self.weight.data
        self.outputs, self.inputs = weight.shape
        self.type = product_type(weight.dtype, self.inputs)
        self.is_halved = isinstance(layer, GatedColumnParallelLinear) and self.outputs % (2 * LANES) != 0
        self.packed = pack(weight, self.type, self._arena, halves=2 if self.is_halved else 1)
        del self.weight, layer.weight

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.packed is None:
            return super().multiply(x, bias)
        if not self.is_halved:
            return _product(self.type, x, self.packed, self.outputs, bias)
        halves, biases = self.packed.chunk(2), (None, None) if bias is None else bias.chunk(2)
        return torch.cat([_product(self.type, x, halves[i], self.outputs // 2, biases[i]) for i in range(2)], dim=1)

    def apply(
        self, x: Tensor, bias: Tensor | None, *, activation: str | None = None, gated: bool = False, residual: Tensor | None = None
    ) -> Tensor:
        fits = self.is_halved or self.outputs % (2 * LANES) == 0 if gated else not self.is_halved
        if self.packed is None or activation not in ACTIVATIONS or not fits:
            return super().apply(x, bias, activation=activation, gated=gated, residual=residual)
        return _product(self.type, x, self.packed, self.outputs, bias, ACTIVATIONS[activation], gated, residual)


def _product(
    type: int,
    x: Tensor,
    packed: Tensor,
    outputs: int,
    bias: Tensor | None,
    activation: int = 0,
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.toolkit_lm_cpu.linear(type, x, packed, outputs, bias, activation, gated, residual)
        return product
    return linear(type, x, packed, outputs, bias, activation, gated, residual)


def pack(weight: Tensor, type: int, arena: Arena, *, halves: int = 1) -> Tensor:
    """A weight [outputs, inputs], contiguous, in panels; where it has two halves, in those of the first, and then of the second."""
    outputs, inputs = len(weight) // halves, weight.shape[1]
    size = -(-outputs // LANES) * LANES * inputs
    packed = arena.empty(halves * size, weight.dtype)
    for half, part in zip(packed.view(halves, size), weight.view(halves, outputs, inputs), strict=True):
        _kernels.pack(type, part.data_ptr(), half.data_ptr(), outputs, inputs)
    return packed


def linear(
    type: int, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, activation: int, gated: bool, residual: Tensor | None
) -> Tensor:
    """activation(x W^T + bias) + residual, or gated, of `outputs` rows of W in panels."""
    if x.stride(1) != 1 or x.stride(0) % 2:
        x = x.contiguous()
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    rows, inputs = x.shape
    width = outputs // 2 if gated else outputs
    out = x.new_empty(rows, width)
    _kernels.linear(
        (type, packed.data_ptr(), 0 if bias is None else bias.data_ptr(), width, inputs, activation, gated),
        (x.data_ptr(), x.stride(0), *((0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))), out.data_ptr(), width),
        rows,
    )
    return out


# To a compiler a product is one opaque op.
_library = torch.library.Library("toolkit_lm_cpu", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "linear(int type, Tensor x, Tensor packed, int outputs, Tensor? bias, int activation, bool gated, Tensor? residual) -> Tensor"
)
_library.impl("linear", linear, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "toolkit_lm_cpu::linear",
    lambda type, x, packed, outputs, bias, activation, gated, residual: x.new_empty(x.shape[0], outputs // 2 if gated else outputs),
    lib=_library,
)
