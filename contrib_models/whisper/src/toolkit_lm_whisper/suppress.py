"""Tokens that Whisper is kept from drawing: those that stand for no speech, and at the beginning a
blank and the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor


class Suppress(LogitsProcessor):
    """Rules out `always` at every place, and `begin` at the first of the output."""

    stage = "logits"
    verifies_drafts = True
    # transformers does the same: log probabilities refer to the tokens that may be drawn.
    in_logprobs = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        always, begin = (
            torch.tensor(arguments[name], dtype=torch.int64, device=self.device)
            for name in ("always", "begin")
        )
        self._rows[row.key] = always, torch.cat([always, begin])

    def remove(self, key: int) -> None:
        self._rows.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        for row, scores in zip(rows, values, strict=True):
            scores[self._rows[row.key][len(row.token_ids) == row.num_prompt_tokens]] = -torch.inf
        return values
