"""Output that another server has begun: its tokens are drafts, so that a step draws many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

_MOST_DRAFTS = 64
"""Tokens that a step computes together, at most."""


class Begun(LogitsProcessor):
    """Proposes the known tokens, and changes no logits: each is drawn as it was the first time. The
    rest is dropped where a draw is another one."""

    stage = "logits"
    verifies_drafts = True
    atomic = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._tokens: dict[int, list[int]] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        """Implements the method of this name."""
        self._tokens[row.key] = arguments["tokens"]

    def remove(self, key: int) -> None:
        """Implements the method of this name."""
        self._tokens.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        """Implements the method of this name."""
        return values

    def drafts(self, row: ProcessorRow) -> list[int]:
        """Implements the method of this name."""
        known = self._tokens[row.key]
        start = len(row.token_ids) - row.num_prompt_tokens
        output = row.token_ids[row.num_prompt_tokens :]
        # The last tokens tell: those before them were checked when they were drafts.
        last = max(start - _MOST_DRAFTS - 1, 0)
        if start > len(known) or output[last:].tolist() != known[last:start]:
            return []
        return known[start : start + _MOST_DRAFTS]
