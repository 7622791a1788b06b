"""Quantized weights: one record for all checkpoint formats, and its product in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toolkit_lm.model.linear_method import LinearMethod, LinearSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedWeight:
    """This rank's share of a weight W [N outputs, K inputs]. A format of checkpoints makes it, and
    kernels store it in their own layout.

    W[n, k] = (value of codes[n, k] - zeros[n, g]) * scales[n, g] - mins[n, g], for input k of group
    g, computed in float32 in this order.
    """

    codes: Tensor
    """[N, K]: uint8, each below 2^bits; or a float8 dtype, whose values are the codes' values."""
    bits: int
    """Bits of a code: 1 to 8."""
    scales: Tensor
    """[N, G] float32."""
    zeros: Tensor | None = None
    """[N, G] float32, whole numbers. None: 2^(bits - 1) for integers, 0 for floats."""
    mins: Tensor | None = None
    """[N, G] float32. None: 0."""
    values: Tensor | None = None
    """[2^bits] float32: the value of each code. None: the code itself."""
    groups: Tensor | None = None
    """[K] int64: the group of each input. None: G runs of equal length."""

    @property
    def group_size(self) -> int:
        """Inputs of a group, if `groups` is None."""
        return self.codes.shape[1] // self.scales.shape[1]

    def select(self, rows: Tensor) -> QuantizedWeight:
        """The weight of some outputs: rows [R] int64 -> W [R, K]."""
        return replace(
            self,
            codes=self.codes[rows],
            scales=self.scales[rows],
            zeros=None if self.zeros is None else self.zeros[rows],
            mins=None if self.mins is None else self.mins[rows],
        )

    def dequantized(self) -> Tensor:
        """W [N, K] float32."""
        is_integer = self.values is None and not self.codes.is_floating_point()
        weight = (
            self.codes.to(torch.float32, copy=True)
            if self.values is None
            else self.values[self.codes.int()]
        )
        if self.zeros is not None:
            weight -= self._of_inputs(self.zeros)
        elif is_integer:
            weight -= 2 ** (self.bits - 1)
        weight *= self._of_inputs(self.scales)
        return weight if self.mins is None else weight.sub_(self._of_inputs(self.mins))

    def _of_inputs(self, of_groups: Tensor) -> Tensor:
        if self.groups is not None:
            return of_groups[:, self.groups]
        return of_groups.repeat_interleave(self.group_size, dim=1)


class DequantizingMethod(LinearMethod):
    """Holds a QuantizedWeight as it is, and dequantizes it at each product: in plain torch, on any
    device."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.is_packed = weight.bits <= 4
        self.stored = replace(weight, codes=_pack(weight.codes)) if self.is_packed else weight

    def create(self, layer: nn.Module, spec: LinearSpec) -> None:
        raise AssertionError("it is made once the weight is loaded")

    def dequantized(self) -> Tensor:
        return self._unpacked(self.stored).dequantized().to(self.dtype)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.dequantized().to(x.dtype), bias)

    def embed(self, ids: Tensor) -> Tensor:
        return self._unpacked(self.stored.select(ids)).dequantized().to(self.dtype)

    def _unpacked(self, weight: QuantizedWeight) -> QuantizedWeight:
        if not self.is_packed:
            return weight
        codes = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(1)
        return replace(weight, codes=codes)


def _pack(codes: Tensor) -> Tensor:
    """[N, K] -> [N, K / 2]: two codes in a byte, the first in the low bits. K is even."""
    return codes[:, ::2] | codes[:, 1::2] << 4
