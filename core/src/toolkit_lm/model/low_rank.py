"""LowRank: products of small rank that kernels add to those of linear layers, by rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from toolkit_lm.model.linear_method import LinearMethod


class AdaptedRows(NamedTuple):
    """Rows of a step that have the same adapter."""

    pairs: Mapping[LinearMethod, Any]
    """Results of `LowRank.pack`, by the layer's method."""
    scale: float
    rows: np.ndarray
    """int64, ascending."""


class LowRank(ABC):
    """Adds scale B A x to the products of linear layers, before activations, in fused layers too. A
    row's bits depend on that row and its adapters alone."""

    @abstractmethod
    def takes(self, method: LinearMethod) -> bool:
        """Whether it can add to the products of a layer with this method."""

    @abstractmethod
    def pack(self, method: LinearMethod, parts: Sequence[tuple[int, Tensor, Tensor]]) -> Any:
        """A pair (A, B) for one layer, with an attribute `nbytes`. Each part: (first output, A
        [rank, inputs], B [outputs, rank]). In any thread."""

    @abstractmethod
    def product(self, pair: Any, x: Tensor) -> Tensor:
        """B A x: [rows, inputs] -> [rows, outputs of the layer]."""

    @abstractmethod
    def set(self, groups: Sequence[AdaptedRows], num_rows: int) -> None:
        """From now on these groups change products of `num_rows` rows that are `Rows.FLAT`. A row
        may be in several groups, which are added in their order."""
