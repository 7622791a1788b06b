"""no_repeat_ngram: no sequence of `size` tokens comes twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

from toolkit_lm_sampling_extra.arguments import only


class NoRepeatNgram(LogitsProcessor):
    """Rules out the tokens that would complete a sequence of `size` tokens that prompt and output hold already."""

    argmax_invariant = False

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._sizes: dict[int, int] = {}

    @classmethod
    def check(cls, arguments: Mapping[str, Any]) -> None:
        size = only(arguments, "size")
        if type(size) is not int or not 1 <= size < 2**31:
            raise ValueError(f"size must be an integer of at least 1, not {size!r}")

    def add(self, key: int, arguments: Mapping[str, Any], prompt_token_ids: Sequence[int]) -> None:
        self._sizes[key] = arguments["size"]

    def remove(self, key: int) -> None:
        del self._sizes[key]

    def apply(self, logits: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        for row, scores in zip(rows, logits, strict=True):
            scores[torch.from_numpy(_completions(row.token_ids, self._sizes[row.key])).to(scores.device)] = -torch.inf
        return logits


def _completions(tokens: np.ndarray, size: int) -> np.ndarray:
    """[N] int64: the tokens that came after an earlier place like the last size - 1 tokens."""
    if len(tokens) < size:
        return np.zeros(0, np.int64)
    earlier = np.lib.stride_tricks.sliding_window_view(tokens, size)
    found: np.ndarray = earlier[(earlier[:, :-1] == tokens[len(tokens) - size + 1 :]).all(axis=1), -1].astype(np.int64)
    return found
