"""epsilon_cutoff: unlikely tokens are never drawn (Hewitt, Manning and Liang 2022, "Truncation Sampling as Language Model Desmoothing")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

from toolkit_lm_sampling_extra.arguments import only


class EpsilonCutoff(LogitsProcessor):
    """Drops the tokens that are less likely than `epsilon`; the likeliest stays."""

    argmax_invariant = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._epsilons: dict[int, float] = {}

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        epsilon = only(arguments, "epsilon")
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < 1:
            raise ValueError(f"epsilon must be a number above 0 and below 1, not {epsilon!r}")

    def add(self, key: int, arguments: Mapping[str, Any], prompt_token_ids: Sequence[int]) -> None:
        self._epsilons[key] = arguments["epsilon"]

    def remove(self, key: int) -> None:
        del self._epsilons[key]

    def apply(self, logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        epsilon = torch.tensor([self._epsilons[row.key] for row in rows], device=logits.device)[:, None]
        unlikely = torch.softmax(logits, dim=-1) < epsilon
        unlikely.scatter_(-1, logits.argmax(dim=-1, keepdim=True), False)
        return logits.masked_fill(unlikely, -torch.inf)
