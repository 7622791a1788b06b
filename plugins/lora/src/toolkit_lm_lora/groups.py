"""The adapters that rows of a step have together, and which rows they are."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from toolkit_lm.model import AdaptedRows, LinearMethod
from torch import Tensor

from toolkit_lm_lora.weights import Adapter

Key = tuple[str, float]
"""An adapter's digest, and its scale."""


class Kind:
    """Adapters that rows have together."""

    def __init__(
        self,
        keys: tuple[Key, ...],
        adapters: list[Adapter],
        methods: Mapping[str, LinearMethod],
    ) -> None:
        self.adapters = adapters
        self.scales = [scale for _, scale in keys]
        changed = {prefix for adapter in adapters for prefix in adapter.changes}
        self.paired = {
            prefix
            for prefix in changed
            if all(
                adapter.changes[prefix].pair is not None
                for adapter in adapters
                if prefix in adapter.changes
            )
        }
        """Layers whose own methods add what the adapters change."""
        self.rest = changed - self.paired
        """The other layers that they change."""
        self.pairs = [
            {
                method: adapter.changes[prefix].pair
                for prefix, method in methods.items()
                if prefix in self.paired and prefix in adapter.changes
            }
            for adapter in adapters
        ]
        """By adapter, in the model's order."""


class StepGroup:
    """The rows of a step that have an adapter, those of one kind."""

    def __init__(
        self,
        kind: Kind,
        place: int,
        number: int,
        rows: tuple[np.ndarray, np.ndarray, np.ndarray],
        device: torch.device,
        of_step: frozenset[int] = frozenset(),
    ) -> None:
        """`place`: the adapter's in the kind. `number`: the kind's in the arrays `rows`: of
        tokens, of rows that sample, and of rows that pool. `of_step`: rows of the step."""
        self.rows = of_step
        self.kind = kind
        self.adapter = kind.adapters[place]
        self.scale = kind.scales[place]
        self.pairs = kind.pairs[place]
        self._number = number
        self.flat, self.sampled, self.pooled = (
            self._indices(np.flatnonzero(kinds == number), len(kinds), device) for kinds in rows
        )
        self._rows = np.flatnonzero(rows[0] == number)

    @staticmethod
    def _indices(found: np.ndarray, count: int, device: torch.device) -> tuple[Tensor, bool, bool]:
        """Indices of the rows, whether all have it, and whether none has."""
        return torch.from_numpy(found).to(device), len(found) == count, not len(found)

    def adapted(self) -> AdaptedRows:
        return AdaptedRows(self.pairs, self.scale, self._rows)

    def of(self, kinds: Tensor) -> tuple[Tensor, bool, bool]:
        """The same of any rows, by their kinds."""
        mine = (kinds == self._number).nonzero()[:, 0]
        return mine, len(mine) == len(kinds), not len(mine)
