"""Adds B (A x) to what a linear layer gives, for the rows of each adapter."""

from __future__ import annotations

from typing import Any, NamedTuple

from toolkit_lm.model import LinearMethod, Rows, WrappingMethod
from torch import Tensor


class Delta(NamedTuple):
    """This rank's share of A and B, for some outputs of a layer."""

    outputs: slice
    low: Tensor
    """[rank, inputs]."""
    high: Tensor
    """[outputs, rank]."""


class LoraMethod(WrappingMethod):
    """Rows of adapters that do not change the layer, and rows without one, are left alone."""

    def __init__(self, inner: LinearMethod, *, part: Any, layer: str) -> None:
        super().__init__(inner)
        self._part = part
        self._layer = layer

    def change(self, x: Tensor, out: Tensor, rows: Rows | Tensor) -> Tensor:
        part = self._part
        changing = [(slot, its) for slot in part.used if (its := part.deltas(slot, self._layer))]
        if not changing or rows is Rows.ENCODER:
            return out
        of_rows = part.slots_of(rows, len(x))
        linear = part.model.kernels.linear
        for slot, deltas in changing:
            if not len(mine := (of_rows == slot).nonzero()[:, 0]):
                continue
            given = x[mine]
            for outputs, low, high in deltas:
                out[mine, outputs] += linear(linear(given, low, None), high, None)
        return out
