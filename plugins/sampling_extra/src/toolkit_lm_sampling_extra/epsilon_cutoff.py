"""epsilon_cutoff: unlikely tokens are never drawn (Hewitt, Manning and Liang 2022, "Truncation
Sampling as Language Model Desmoothing")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor


class EpsilonCutoff(LogitsProcessor):
    """Drops the tokens that are less likely than `epsilon`; the likeliest stays."""

    stage = "probs"
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._epsilons: dict[int, float] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        self._epsilons[row.key] = arguments["epsilon"]

    def remove(self, key: int) -> None:
        self._epsilons.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        unlikely = (
            values
            < torch.tensor([self._epsilons[row.key] for row in rows], device=values.device)[:, None]
        )
        return values.masked_fill(
            unlikely.scatter_(-1, values.argmax(dim=-1, keepdim=True), False), 0.0
        )
