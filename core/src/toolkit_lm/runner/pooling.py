"""Pooling in a step: which rows pool, what their pooler keeps of them between chunks, and their results."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from toolkit_lm.messages import Array, NewSequence, StepPlan
from toolkit_lm.pooling import Pooler, PoolingMetadata, PoolingRow
from toolkit_lm.runner.batch import PersistentBatch, StepInputs


class PoolingBatch:
    """The pooling sequences that the runner holds."""

    def __init__(self, pooler: Pooler) -> None:
        self.pooler = pooler
        self._sequences: dict[int, NewSequence] = {}
        self._states: dict[int, dict[str, Any]] = {}

    def update(self, plan: StepPlan) -> None:
        """Takes in what a plan says of sequences that leave and join. One that comes back begins anew."""
        for seq_id in plan.dropped:
            self._sequences.pop(seq_id, None)
            self._states.pop(seq_id, None)
        for seq in plan.new:
            if seq.inputs.pooling is not None:
                self._sequences[seq.seq_id] = seq
                self._states[seq.seq_id] = {}

    def token_types(self, plan: StepPlan, inputs: StepInputs) -> np.ndarray:
        """[T] int64: 1 for the tokens of a pair's second text, else 0."""
        types = np.zeros(len(inputs.positions), np.int64)
        for index, scheduled in enumerate(plan.scheduled):
            seq = self._sequences.get(scheduled.seq_id)
            if seq is not None and seq.inputs.second_text_start is not None:
                tokens = slice(inputs.query_start[index], inputs.query_start[index + 1])
                types[tokens] = inputs.positions[tokens] >= seq.inputs.second_text_start
        return types

    def seq_lens(self, plan: StepPlan, inputs: StepInputs) -> np.ndarray:
        """[R] int32: keys that each row sees. The tokens with which a late-interaction query is filled up may not be among them."""
        lengths = inputs.seq_lens.copy()
        for index, scheduled in enumerate(plan.scheduled):
            seq = self._sequences.get(scheduled.seq_id)
            if seq is not None and seq.inputs.num_attended is not None:
                lengths[index] = seq.inputs.num_attended
        return lengths

    def pool(
        self, plan: StepPlan, inputs: StepInputs, batch: PersistentBatch, hidden_states: Tensor
    ) -> tuple[dict[int, Array], dict[int, str]]:
        """Results and errors by seq_id; hidden_states [T, H]. Sequences that need more chunks have neither."""
        rows: dict[int, PoolingRow] = {}
        for index, scheduled in enumerate(plan.scheduled):
            if (seq := self._sequences.get(scheduled.seq_id)) is not None:
                rows[seq.seq_id] = self._row(seq, index, inputs, batch)
        if not rows:
            return {}, {}
        results, errors = {}, {}
        pooled = self.pooler(hidden_states, PoolingMetadata(list(rows.values())))
        for seq_id, tensor in zip(rows, pooled, strict=True):
            if tensor is None:
                continue
            values = tensor.float().contiguous().cpu().numpy()
            if np.isfinite(values).all():
                results[seq_id] = as_array(values)
            else:
                errors[seq_id] = "the model's result is not finite"
        return results, errors

    def _row(self, seq: NewSequence, index: int, inputs: StepInputs, batch: PersistentBatch) -> PoolingRow:
        assert seq.inputs.pooling is not None
        tokens = slice(int(inputs.query_start[index]), int(inputs.query_start[index + 1]))
        start = int(inputs.positions[tokens.start])
        return PoolingRow(
            params=seq.inputs.pooling,
            tokens=tokens,
            token_ids=batch.history.tokens(int(inputs.rows[index]))[start : start + tokens.stop - tokens.start],
            start=start,
            num_prompt_tokens=seq.num_prompt_tokens,
            pooling_start=seq.inputs.pooling_start,
            state=self._states[seq.seq_id],
        )


def as_array(values: np.ndarray) -> Array:
    """A contiguous float32 array as a message."""
    # An empty array has no memory to look at.
    data = values.reshape(-1).data.cast("B") if values.size else memoryview(b"")
    return Array("float32", list(values.shape), data)
