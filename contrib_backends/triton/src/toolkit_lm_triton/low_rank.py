"""TritonLowRank: B A x of adapters, added to products by kernels over the rows of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from toolkit_lm.model import AdaptedRows, LinearMethod, LowRank
from torch import Tensor
from torch.nn import functional as F

from toolkit_lm_triton.device import LAUNCH
from toolkit_lm_triton.gated import GatedMethod

_ROWS = 16
"""Rows of a program: always the same, so that a row's bits do not depend on how many others there
are."""
_RANK = 16
"""Ranks are filled up to a multiple of it, the smallest matrix that tensor cores multiply."""
_TILE = 128
"""Inputs that a program multiplies at a time."""
_TILES = 8
"""Tiles of inputs of a program: others compute the next ones, and their sums are added after."""
_OUTPUTS = 64
_COLUMNS = 6


class Part(NamedTuple):
    """A [rank, inputs] and B [outputs, rank] of outputs from the `first` on."""

    first: int
    low: Tensor
    high: Tensor


class Pair(NamedTuple):
    """A and B of an adapter for one layer."""

    parts: tuple[Part, ...]
    outputs: int

    @property
    def nbytes(self) -> int:
        return sum(part.low.nbytes + part.high.nbytes for part in self.parts)

    def entries(self) -> list[list[int]]:
        """The parts as the kernels' table has them."""
        place = 0
        found = []
        for first, low, high in self.parts:
            addresses = low.data_ptr(), high.data_ptr()
            found.append([*addresses, len(low), place, first, first + len(high)])
            place += len(low)
        return found

    @property
    def width(self) -> int:
        return sum(len(part.low) for part in self.parts)


class Step:
    """The rows of a step that have adapters, the same for all layers."""

    def __init__(self, groups: Sequence[AdaptedRows], num_rows: int, device: torch.device) -> None:
        self.num_rows = num_rows
        ends = np.cumsum([0, *(len(group.rows) for group in groups)])
        rounds = _rounds([group.rows for group in groups])
        pieces = [
            [
                (index, first, min(first + _ROWS, int(ends[index + 1])))
                for index in range(len(groups))
                if rounds[index] == number
                for first in range(int(ends[index]), int(ends[index + 1]), _ROWS)
            ]
            for number in range(max(rounds) + 1)
        ]
        self.count = int(ends[-1])
        self.pieces = torch.tensor([*chain(*pieces)], dtype=torch.int32).to(device)
        self.rounds = torch.split(self.pieces, [len(some) for some in pieces])
        """Pieces of groups without a row in common."""
        rows = np.concatenate([group.rows for group in groups]).astype(np.int32)
        self.rows = torch.from_numpy(rows).to(device)
        self.scales = torch.tensor([group.scale for group in groups]).to(device)


class Added:
    """Adapters of one linear method, in a step."""

    def __init__(self, pairs: Sequence[Pair | None], kernels: Any) -> None:
        """`pairs`: by group of rows. None: its adapter does not change the layer."""
        self.step: Step | None = None
        self._kernels = kernels
        self._pairs = [pair for pair in pairs if pair is not None]
        self._num_parts = max(len(pair.parts) for pair in self._pairs)
        self._width = max(pair.width for pair in self._pairs)
        self._rank = max(len(part.low) for pair in self._pairs for part in pair.parts)
        table = np.zeros((len(pairs), self._num_parts, _COLUMNS), np.int64)
        for index, pair in enumerate(pairs):
            if pair is not None:
                table[index, : len(pair.parts)] = pair.entries()
        self._table = torch.from_numpy(table).to(self._pairs[0].parts[0].low.device)

    def to(self, x: Tensor, out: Tensor) -> Tensor:
        """Adds to products `out` [rows, outputs] of x [rows, inputs], in place."""
        step = self.step
        assert step is not None
        if x.stride(1) != 1:
            x = x.contiguous()
        splits = -(-x.shape[1] // (_TILE * _TILES))
        low = torch.empty(splits, step.count, self._width, dtype=torch.float32, device=x.device)
        shape = {"PARTS": self._num_parts, "COLUMNS": _COLUMNS, "ROWS": _ROWS, "RANK": _RANK}
        programs = len(step.pieces), self._num_parts * (self._rank // _RANK), splits
        self._kernels.shrink[programs](
            *(x, self._table, step.pieces, step.rows, low),
            *(step.count, x.shape[1], self._width, x.stride(0)),
            **shape,
            TILE=_TILE,
            TILES=_TILES,
            **LAUNCH,
        )
        outputs = out.shape[1]
        for pieces in step.rounds:
            self._kernels.expand[len(pieces), -(-outputs // _OUTPUTS)](
                *(low, self._table, pieces, step.rows, step.scales, out),
                *(step.count, outputs, self._width, splits, out.stride(0)),
                **shape,
                OUTPUTS=_OUTPUTS,
                **LAUNCH,
            )
        return out


class TritonLowRank(LowRank):
    """Two kernels for all adapters of a product: A x by rows and ranks, then B, which is added in
    float32 to the rounded product. No rank is filled up to that of another adapter."""

    def __init__(self, device: str) -> None:
        from toolkit_lm_triton.kernels import low_rank

        self._kernels: Any = low_rank
        self._device = device
        self._of: list[Mapping[LinearMethod, Pair]] = []
        """The pairs of each group of the last step."""
        self._methods: set[Any] = set()
        """Methods that have something to add."""

    def takes(self, method: LinearMethod) -> bool:
        return isinstance(method, GatedMethod) and method.stored.device.type == self._device

    def pack(self, method: LinearMethod, parts: Sequence[tuple[int, Tensor, Tensor]]) -> Pair:
        assert isinstance(method, GatedMethod)
        device = method.stored.device
        made = []
        for first, low, high in parts:
            more = -len(low) % _RANK
            made.append(
                Part(
                    first,
                    F.pad(low, (0, 0, 0, more)).to(device, method.dtype).contiguous(),
                    F.pad(high, (0, more)).to(device, method.dtype).contiguous(),
                )
            )
        return Pair(tuple(made), len(method.stored))

    def product(self, pair: Pair, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), pair.outputs)
        for first, low, high in pair.parts:
            out[:, first : first + len(high)] += F.linear(F.linear(x, low), high)
        return out

    def set(self, groups: Sequence[AdaptedRows], num_rows: int) -> None:
        of = [group.pairs for group in groups]
        if len(of) != len(self._of) or any(
            mine is not theirs for mine, theirs in zip(of, self._of, strict=True)
        ):
            self._point(of)
        if groups and self._methods:
            step = Step(groups, num_rows, next(iter(self._methods)).stored.device)
            for method in self._methods:
                method.added.step = step

    def _point(self, of: list[Mapping[LinearMethod, Pair]]) -> None:
        """Tells each method its pairs, by group."""
        methods: set[Any] = {method for pairs in of for method in pairs}
        for method in self._methods - methods:
            method.added = None
        for method in methods:
            method.added = Added([those.get(method) for those in of], self._kernels)
        self._methods = methods
        self._of = of


def _rounds(rows: Sequence[np.ndarray]) -> list[int]:
    """The number of the launch that adds each group: the first one after those of groups before it
    that have a row in common."""
    found: list[int] = []
    for index, mine in enumerate(rows):
        before = (
            found[other] + 1
            for other in range(index)
            if len(np.intersect1d(mine, rows[other], assume_unique=True))
        )
        found.append(max(before, default=0))
    return found
