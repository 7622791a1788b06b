"""The rules of timestamps in transcripts: pairs that do not go back, as transformers has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor


class Timestamps(LogitsProcessor):
    """`begin`: the token of 0.00 s, after which all others stand; the one before it says that there
    are none. `end`: that ends a text.

    `most_first`: the latest timestamp that a transcript may begin with; None: any.
    """

    stage = "logits"
    verifies_drafts = True
    # transformers does the same: log probabilities refer to the tokens that may be drawn.
    in_logprobs = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._rows: dict[int, Mapping[str, Any]] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        self._rows[row.key] = arguments

    def remove(self, key: int) -> None:
        self._rows.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        for row, scores in zip(rows, values, strict=True):
            self._apply(scores, row.token_ids[row.num_prompt_tokens :], **self._rows[row.key])
        return values

    def _apply(
        self, scores: Tensor, output: np.ndarray, *, begin: int, end: int, most_first: int | None
    ) -> None:
        scores[begin - 1] = -torch.inf
        if not len(output):
            scores[:begin] = -torch.inf
            if most_first is not None:
                scores[begin + most_first + 1 :] = -torch.inf
        is_time = output >= begin
        last = bool(is_time[-1:].any())
        before = len(output) < 2 or bool(is_time[-2])
        if last and before:
            # A pair is complete, or the first stands alone: text follows.
            scores[begin:] = -torch.inf
        elif last:
            scores[:end] = -torch.inf
        if is_time.any():
            # Time does not go back, and only the second of a pair may stand still.
            latest = int(output[is_time][-1])
            scores[begin : latest + (0 if last and not before else 1)] = -torch.inf
        if scores[begin:].logsumexp(0) > scores[:begin].max():
            scores[:begin] = -torch.inf
