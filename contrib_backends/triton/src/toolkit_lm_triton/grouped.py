"""GroupedProducts: one product of several experts with quantized weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from toolkit_lm.model import NO_EPILOGUE, Epilogue, LinearMethod
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_triton.quantized import QuantizedProduct, choose, launch, quantize_rows

_MANY_ROWS = 128
"""With more rows of each expert, weights are dequantized one by one: PyTorch's product makes up for
that, and for the wait for their numbers."""


class GroupedProducts:
    """Several experts' weights, which are stored alike, in one: the grid of a kernel goes over the
    rows of all. The methods go on with slices of it.

    How many rows an expert has is not asked for, so that the host need not wait, and graphs can be
    captured.
    """

    def __init__(self, methods: Sequence[QuantizedProduct]) -> None:
        self.methods = methods
        self.first = methods[0]
        codes = self._stack("codes")
        assert codes is not None
        self.codes = codes
        # Where scales of some experts are exact in fewer bits than those of others, all have more.
        self.scales = self._stack("scales")
        self.zeros = self._stack("zeros")
        self.mins = self._stack("mins")

    @staticmethod
    def of(methods: Sequence[LinearMethod]) -> GroupedProducts | None:
        """None: weights are of other kernels, stored in several ways, or their groups of inputs are
        in an order of their own."""
        ours = [method for method in methods if type(method) is QuantizedProduct]
        if not ours or len(ours) < len(methods) or len({method.layout() for method in ours}) > 1:
            return None
        ordered = any(method.order is not None or method.groups is not None for method in ours)
        return None if ordered else GroupedProducts(ours)

    def __call__(
        self, rows: Tensor, ends: Tensor, biases: Tensor | None, epilogue: Epilogue = NO_EPILOGUE
    ) -> Tensor:
        return epilogue.finish(self._product(rows, ends, biases))

    def _product(self, rows: Tensor, ends: Tensor, biases: Tensor | None) -> Tensor:
        first = self.first
        experts, outputs, width = self.codes.shape
        count = len(rows)
        if not count:
            return rows.new_empty(0, outputs)
        if count > _MANY_ROWS * experts and not first.is_coded:
            return self._one_by_one(rows, ends, biases)
        x = rows if rows.stride(1) == 1 else rows.contiguous()
        x_scales = None
        if first.is_coded:
            x, x_scales = quantize_rows(x, first.tile, torch.int8)
        busy = min(experts, count)
        tiles = width // first.tile
        choice = choose(-(-count // busy), outputs, tiles, x.element_size(), busy)
        pieces = pieces_of(ends, count, choice.rows)
        values = None if first.is_e2m1 else first.values
        weight = (self.codes, self.scales, self.zeros, self.mins, values, None)
        sizes = first.inputs, rows.dtype, choice, len(pieces), first.constants()
        return launch(x, x_scales, weight, biases, pieces, *sizes)

    def _one_by_one(self, rows: Tensor, ends: Tensor, biases: Tensor | None) -> Tensor:
        """The same with a product for each expert that has rows, whose weight is dequantized."""
        out = rows.new_empty(len(rows), self.codes.shape[1])
        begin = 0
        for expert, end in enumerate(ends.tolist()):
            bias = None if biases is None else biases[expert]
            if end > begin:
                out[begin:end] = self.methods[expert].multiply(rows[begin:end], bias)
            begin = end
        return out

    def _stack(self, name: str) -> Tensor | None:
        """One tensor of several, of which those of the methods become slices."""
        parts = [getattr(method, name) for method in self.methods]
        if parts[0] is None:
            return None
        dtype = torch.promote_types(parts[0].dtype, parts[-1].dtype)
        if any(part.dtype is not parts[0].dtype for part in parts):
            dtype = torch.float32
        whole = torch.stack([part.to(dtype) for part in parts])
        for method, own in zip(self.methods, whole, strict=True):
            setattr(method, name, own)
        return whole


def pieces_of(ends: Tensor, rows: int, block: int) -> Tensor:
    """Pieces of at most `block` rows, each of one expert: ends [E] (int32) of the experts' rows ->
    [P, 3] int32. Pieces that are left over have no rows."""
    before = F.pad(ends, (1, 0))[:-1]
    counts = (ends - before + block - 1) // block
    until = counts.cumsum(0)
    # Each expert with rows has one piece that is not full.
    number = torch.arange(rows // block + min(len(ends), rows), device=ends.device)
    expert = torch.searchsorted(until, number, right=True)
    is_used = expert < len(ends)
    expert = expert.clamp_(max=len(ends) - 1)
    first = before[expert] + (number - (until - counts)[expert]) * block
    pieces = torch.stack([expert, first, torch.minimum(ends[expert], first + block)], dim=1)
    return (pieces * is_used.unsqueeze(1)).int()
