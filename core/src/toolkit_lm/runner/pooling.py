"""Pooling in a step: which rows pool, what their pooler keeps of them between chunks, and their results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import Array, NewSequence, StepResult
from toolkit_lm.model import ModelState, StepInputs
from toolkit_lm.pooling import Pooler, PoolingMetadata, PoolingRow


class PoolingState(ModelState):
    """The pooling sequences that the runner holds. One that comes back from a preemption begins anew."""

    def __init__(self, model: nn.Module, config: VllmConfig, device: torch.device) -> None:
        super().__init__(model, config, device)
        assert isinstance(model.pooler, Pooler)
        self.pooler = model.pooler
        self._sequences: dict[int, NewSequence] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def add(self, seq: NewSequence) -> None:
        if seq.inputs.pooling is not None:
            self._sequences[seq.seq_id] = seq
            self._states[seq.seq_id] = {}

    def remove(self, seq_id: int) -> None:
        self._sequences.pop(seq_id, None)
        self._states.pop(seq_id, None)

    def groups(self, inputs: StepInputs) -> None:
        """The tokens with which a late-interaction query is filled up may not be seen."""
        for index, seq in self._rows(inputs):
            if seq.inputs.num_attended is not None:
                for group in inputs.groups:
                    group.seq_lens[index] = seq.inputs.num_attended

    def inputs(self, inputs: StepInputs) -> dict[str, Tensor]:
        """`token_type_ids` [T] int64: 1 for the tokens of a pair's second text, else 0."""
        if not self.model.takes_token_types:
            return {}
        types = np.zeros(len(inputs.token_index), np.int64)
        for index, seq in self._rows(inputs):
            if seq.inputs.second_text_start is not None:
                tokens = slice(inputs.query_start[index], inputs.query_start[index + 1])
                types[tokens] = inputs.token_index[tokens] >= seq.inputs.second_text_start
        return {"token_type_ids": torch.from_numpy(types).to(self.device, non_blocking=True)}

    def finish(self, inputs: StepInputs, hidden_states: Tensor, result: StepResult) -> None:
        """Sequences that need more chunks have neither a result nor an error."""
        rows = {seq.seq_id: self._row(seq, index, inputs) for index, seq in self._rows(inputs)}
        if not rows:
            return
        for seq_id, tensor in zip(rows, self.pooler(hidden_states, PoolingMetadata(list(rows.values()))), strict=True):
            if tensor is None:
                continue
            values = tensor.float().contiguous().cpu().numpy()
            if np.isfinite(values).all():
                result.pooled[seq_id] = Array.of(values)
            else:
                result.errors[seq_id] = "the model's result is not finite"

    def _rows(self, inputs: StepInputs) -> list[tuple[int, NewSequence]]:
        """The step's rows that pool, and their sequences."""
        if not self._sequences:
            return []
        found = [(index, self._sequences.get(scheduled.seq_id)) for index, scheduled in enumerate(inputs.plan.scheduled)]
        return [(index, seq) for index, seq in found if seq is not None]

    def _row(self, seq: NewSequence, index: int, inputs: StepInputs) -> PoolingRow:
        assert seq.inputs.pooling is not None
        tokens = slice(int(inputs.query_start[index]), int(inputs.query_start[index + 1]))
        start = int(inputs.starts[index])
        return PoolingRow(
            params=seq.inputs.pooling,
            tokens=tokens,
            token_ids=inputs.histories.tokens(int(inputs.rows[index]))[start : start + tokens.stop - tokens.start],
            start=start,
            num_prompt_tokens=seq.num_prompt_tokens,
            pooling_start=seq.inputs.pooling_start,
            state=self._states[seq.seq_id],
        )
