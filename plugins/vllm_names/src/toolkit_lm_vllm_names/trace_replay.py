"""Trace replay: a request's output tokens are given, with the model's log probabilities of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.params import OF_THE_REQUEST
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

_MOST_DRAFTS = 16
"""Tokens of a trace that a step computes together, at most."""


class TraceReplay(LogitsProcessor):
    """Rules out all tokens but the trace's next one. Log probabilities stay those of the model."""

    stage = "logits"
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._traces: dict[int, list[int]] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        """Implements the method of this name."""
        self._traces[row.key] = arguments["trace"]

    def remove(self, key: int) -> None:
        """Implements the method of this name."""
        self._traces.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        """Implements the method of this name. Raises RequestError behind the last token."""
        kept = torch.full_like(values, float("-inf"))
        for index, row in enumerate(rows):
            rest = self._rest(row)
            if not rest:
                raise RequestError(
                    f"{OF_THE_REQUEST} have trace_decode_token_ids with "
                    f"{len(self._traces[row.key])} tokens, and no end there: set max_tokens to "
                    "their number",
                    "max_tokens",
                )
            kept[index, rest[0]] = 0.0
        return kept

    def drafts(self, row: ProcessorRow) -> list[int]:
        """Implements the method of this name."""
        return self._rest(row)[:-1][:_MOST_DRAFTS]

    def num_allowed(self, row: ProcessorRow, drafts: Sequence[int]) -> int:
        """Implements the method of this name."""
        return min(len(drafts), max(0, len(self._rest(row)) - 1))

    def _rest(self, row: ProcessorRow) -> list[int]:
        """Tokens of the trace behind those of the row."""
        return self._traces[row.key][len(row.token_ids) - row.num_prompt_tokens :]
