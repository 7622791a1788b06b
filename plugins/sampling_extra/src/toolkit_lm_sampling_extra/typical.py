"""Typical sampling: tokens are drawn whose surprise is near the average (Meister et al. 2022,
"Locally Typical Sampling")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor


class Typical(LogitsProcessor):
    """Keeps the tokens whose surprise is nearest to the entropy: the fewest that together have
    probability `p`, and at least one."""

    stage = "probs"
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._ps: dict[int, float] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        self._ps[row.key] = arguments["p"]

    def remove(self, key: int) -> None:
        self._ps.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        p = torch.tensor([self._ps[row.key] for row in rows], device=values.device)[:, None]
        surprise = -values.log()
        # A token of probability 0 adds nothing to the entropy.
        entropy = (values * surprise).nan_to_num(0.0).cumsum(dim=-1)[:, -1:]
        distance = (surprise - entropy).abs()
        nearest, order = distance.sort(dim=-1, stable=True)
        total = values.gather(-1, order).cumsum(dim=-1, dtype=torch.float64)
        last = (total < p).sum(dim=-1, keepdim=True).clamp_(max=values.shape[-1] - 1)
        # Tokens that are as far away as the last one are kept with it.
        return values.masked_fill(distance > nearest.gather(-1, last), 0.0)
