"""Mirostat 2.0: tokens are drawn so that their surprise stays near a target (Basu et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor


class Mirostat(LogitsProcessor):
    """Keeps the tokens of at most `mu` bits, and the likeliest; each draw moves `mu` by `eta` times
    what it misses `tau` by."""

    stage = "probs"

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._arguments: dict[int, tuple[float, float]] = {}
        """tau and eta."""
        self._mu: dict[int, float] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        tau = arguments["tau"]
        eta = arguments["eta"]
        self._arguments[row.key] = tau, float(np.float32(eta))
        self._mu[row.key] = state.get("mu", 2.0 * tau)

    def remove(self, key: int) -> None:
        self._arguments.pop(key, None)
        self._mu.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        most = torch.tensor(
            [self._mu[row.key] for row in rows], dtype=values.dtype, device=values.device
        )[:, None]
        dropped = -values.log2() > most
        return values.masked_fill(
            dropped.scatter_(-1, values.argmax(dim=-1, keepdim=True), False), 0.0
        )

    def after_draw(self, row: ProcessorRow, token_id: int, prob: float) -> Mapping[str, float]:
        tau, eta = self._arguments[row.key]
        surprise = -float(np.log2(max(prob, np.finfo(np.float64).tiny)))
        self._mu[row.key] -= eta * (surprise - tau)
        return {"mu": self._mu[row.key]}
