"""XTC, "exclude top choices": at times all likely tokens but the least likely of them are dropped.

As its author states it (p-e-w, text-generation-webui, pull request 6335).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow, uniforms
from torch import Tensor

STREAM = 1
"""Stream of the random numbers that decide whether XTC applies."""


class Xtc(LogitsProcessor):
    """Drops all tokens with at least `threshold` probability except the least likely of them.
    Applies to a draw with the chance `probability`."""

    stage = "probs"
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._arguments: dict[int, tuple[float, float]] = {}
        """Probability and threshold."""

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        self._arguments[row.key] = arguments["probability"], arguments["threshold"]

    def remove(self, key: int) -> None:
        self._arguments.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        probability, threshold = np.array([self._arguments[row.key] for row in rows], np.float32).T
        applied = torch.from_numpy(uniforms(rows, STREAM) < probability).to(values.device)[:, None]
        top = values >= torch.tensor(threshold, device=values.device)[:, None]
        least_likely = values.masked_fill(~top, torch.inf).argmin(dim=-1, keepdim=True)
        return values.masked_fill((top & applied).scatter_(-1, least_likely, False), 0.0)
