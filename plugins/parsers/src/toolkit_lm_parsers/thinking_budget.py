"""ThinkingBudget: reasoning that has spent its tokens ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.sampling import LogitsProcessor, ProcessorRow
from torch import Tensor

from toolkit_lm_parsers.marks import PROMPT_END, Marks, ReasoningReader


class SequenceBudget:
    """Reasoning budget of one sequence. Its state follows from the tokens alone, so nothing else
    must survive a preemption."""

    def __init__(self, row: ProcessorRow, arguments: Mapping[str, Any]) -> None:
        prompt = row.token_ids[
            max(0, row.num_prompt_tokens - PROMPT_END) : row.num_prompt_tokens
        ].tolist()
        # Keys of mappings may have become texts on their way.
        texts = {int(token_id): text for token_id, text in arguments["texts"].items()}
        self._reader = ReasoningReader(Marks(*arguments["marks"]), texts, prompt)
        self._budget: int = arguments["budget"]
        self._forced: list[list[int]] = [arguments["forced"], arguments["forced_again"]]
        self._left: list[int] = []
        """Tokens that must follow those that were forced already."""
        self._given_up = 0
        """The stretch of reasoning whose end was ruled out when it was half written: another try
        would leave another half."""
        self._num_read = 0

    def must_follow(self, row: ProcessorRow) -> list[int]:
        """The tokens that end the reasoning, where it has spent its budget; empty: anything may
        follow."""
        end = len(row.token_ids) - row.num_drafts
        self._read(row.token_ids[row.num_prompt_tokens + self._num_read : end].tolist())
        if not row.num_drafts:
            return self._expected()
        drafted = copy(self)
        drafted._reader = self._reader.copy()
        drafted._read(row.token_ids[end:].tolist())
        return drafted._expected()

    def _read(self, token_ids: list[int]) -> None:
        self._num_read += len(token_ids)
        for token_id in token_ids:
            expected = self._expected()
            if expected[:1] == [token_id]:
                self._left = expected[1:]
            elif self._left:
                self._left = []
                self._given_up = self._reader.num_spans
            self._reader.push([token_id])

    def _expected(self) -> list[int]:
        if self._left:
            return self._left
        reader = self._reader
        if (
            not reader.is_inside
            or reader.num_tokens < self._budget
            or reader.num_spans == self._given_up
        ):
            return []
        # Reasoning that begins after the budget is spent ends for good.
        begins_spent = reader.num_spans > 1 and reader.num_at_start >= self._budget
        return self._forced[begins_spent]


class ThinkingBudget(LogitsProcessor):
    """Rules out all but the tokens of the end, one after the other. Where these are ruled out by
    others, it waits until they are not."""

    stage = "logits"
    atomic = True
    verifies_drafts = True

    def __init__(self, config: VllmConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._sequences: dict[int, SequenceBudget] = {}

    def add(
        self, row: ProcessorRow, arguments: Mapping[str, Any], state: Mapping[str, float]
    ) -> None:
        self._sequences[row.key] = SequenceBudget(row, arguments)

    def remove(self, key: int) -> None:
        self._sequences.pop(key, None)

    def apply(self, values: Tensor, rows: Sequence[ProcessorRow]) -> Tensor:
        following = [self._sequences[row.key].must_follow(row) for row in rows]
        for scores, tokens in zip(values, following, strict=True):
            if tokens and (score := scores[tokens[0]].clone()) > -torch.inf:
                scores.fill_(-torch.inf)
                scores[tokens[0]] = score
        return values

    def drafts(self, row: ProcessorRow) -> list[int]:
        return self._sequences[row.key].must_follow(row)
