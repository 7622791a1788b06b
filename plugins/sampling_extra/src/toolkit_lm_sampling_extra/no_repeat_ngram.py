"""no_repeat_ngram: no sequence of `size` tokens comes twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor


class NoRepeatNgram(LogitsProcessor):
    """Rules out the tokens that would complete a sequence of `size` tokens that prompt and output
    hold already."""

    stage = "logits"
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._sizes: dict[int, int] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        self._sizes[row.key] = arguments["size"]

    def remove(self, key: int) -> None:
        self._sizes.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        for row, scores in zip(rows, values, strict=True):
            scores[
                torch.from_numpy(_completions(row.token_ids, self._sizes[row.key])).to(
                    scores.device
                )
            ] = -torch.inf
        return values


def _completions(tokens: np.ndarray, size: int) -> np.ndarray:
    """[N] int64: the tokens that came after an earlier place like the last size - 1 tokens."""
    if len(tokens) < size:
        return np.zeros(0, np.int64)
    earlier = np.lib.stride_tricks.sliding_window_view(tokens, size)
    found: np.ndarray = earlier[
        (earlier[:, :-1] == tokens[len(tokens) - size + 1 :]).all(axis=1), -1
    ].astype(np.int64)
    return found
