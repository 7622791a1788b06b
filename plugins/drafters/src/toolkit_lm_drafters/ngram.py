"""The drafter "ngram": prompt lookup."""

from __future__ import annotations

from typing import Any

import numpy as np
from toolkit_lm.messages import StepResult
from toolkit_lm.step import StepInputs, StepRun
from torch import Tensor

from toolkit_lm_drafters.step_table import Tabled
from toolkit_lm_drafters.token_index import TokenIndex, common_suffix

_CANDIDATES = 128
"""Most earlier occurrences that are compared."""
_DRAFTS = 16
"""Most drafts of a sequence in a step, unless an option says otherwise."""


class NgramDrafter(Tabled):
    """Finds the last tokens of a sequence earlier in it, and drafts the tokens that followed there.

    The longest match counts, of equally long ones the latest. It yields as many drafts as it has
    tokens; one of the most tokens that are looked up yields all. Each sequence has an index, which
    grows with it.
    """

    def __init__(self, *arguments: Any, **own: Any) -> None:
        super().__init__(*arguments, **own)
        self._shortest, self._longest = self.options.lookup
        self._num_drafts = self.options.num_speculative_tokens or _DRAFTS
        self._indexes: dict[int, TokenIndex] = {}

    def remove(self, seq_id: int) -> None:
        self._indexes.pop(seq_id, None)

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        histories = inputs.histories
        for place, most in zip(inputs.sampling, inputs.max_drafts, strict=True):
            if most and result.token_ids[place]:
                seq_id = inputs.plan.scheduled[place].seq_id
                tokens = histories.tokens(inputs.rows[place])
                index = self._indexes.get(seq_id)
                if index is None:
                    index = self._indexes[seq_id] = TokenIndex(self._shortest, len(tokens) + 64)
                if drafts := self._look_up(index, tokens, most):
                    result.drafts[seq_id] = drafts

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return self._look_up(
            TokenIndex(self._shortest, len(token_ids)), token_ids, self._num_drafts
        )

    def _look_up(self, index: TokenIndex, tokens: np.ndarray, most: int) -> list[int]:
        index.update(tokens)
        view = tokens.data
        end = len(tokens)
        longest = source = 0
        for place in index.occurrences(view, end, _CANDIDATES):
            if longest and (
                place == longest or view[place - longest - 1] != view[end - longest - 1]
            ):
                # It is no longer than what was found.
                continue
            length = common_suffix(view, end, view, place, self._longest)
            if length > longest:
                longest = length
                source = place
                if length == self._longest:
                    break
        if longest < self._longest:
            # A match that has just begun is likely to end soon.
            most = min(most, longest)
        return _copy(view, source, end, min(self._num_drafts, most)) if longest else []


def _copy(tokens: memoryview, source: int, end: int, count: int) -> list[int]:
    """Returns `count` tokens from `source` on. Where tokens[:end] ends, the copy repeats itself."""
    copied = tokens[source : min(source + count, end)].tolist()
    while len(copied) < count:
        copied += copied[: count - len(copied)]
    return copied
