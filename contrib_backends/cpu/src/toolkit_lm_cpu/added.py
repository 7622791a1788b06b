"""Adapters of the rows of a step, for the methods whose products they change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from toolkit_lm_cpu.library import _kernels


class Pair(NamedTuple):
    """A and B of an adapter for one layer, in panels."""

    described: object
    """The kernels' LowRank, which points to the tensors."""
    tensors: tuple[Tensor, ...]
    rank: int
    outputs: int
    type: int

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class StepRows:
    """The rows of a step that have adapters, the same for all layers."""

    def __init__(self) -> None:
        self.num_rows = -1
        self.groups: object = None
        """The kernels' groups."""
        self.rows: list[Any] = []
        """The arrays that they point to."""

    def put(self, pieces: Sequence[tuple[Any, float]], rank: int, num_rows: int) -> None:
        """Rows and scale of each group; `rank`: the greatest."""
        self.rows = [rows for rows, _ in pieces]
        groups = [(rows.ctypes.data, len(rows), scale) for rows, scale in pieces]
        self.groups = _kernels.row_groups(tuple(groups), rank)
        self.num_rows = num_rows


class Added(NamedTuple):
    """Adapters of one linear method, in a step."""

    step: StepRows
    low_ranks: object
    """The kernels' pairs, by group."""
    pairs: tuple[Pair | None, ...]
    """The same, which those point to."""
