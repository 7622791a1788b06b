"""Pooling in a step: which rows pool, what their pooler keeps of them between chunks, and their
results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, NewSequence, StepResult
from toolkit_lm.parts import PoolingPart
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling import Pooler
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.step import StepInputs, StepRun
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRow:
    """One sequence's part of a step."""

    params: PoolingParams
    tokens: slice
    """Position of its tokens of this step in the flat batch."""
    token_ids: np.ndarray
    """[number of these tokens] int32."""
    start: int
    """Position of the first of them: more than 0 in later chunks of a prompt, and where the
    beginning was in the prefix cache."""
    num_prompt_tokens: int
    pooling_start: int = 0
    """embed: position of the prompt's first token that is pooled; those before have no part in its
    vector."""
    state: dict[str, Any] = field(default_factory=dict)
    """State that a pooler keeps of a sequence between its chunks. Empty at the first."""

    @property
    def finished(self) -> bool:
        """These are its last tokens."""
        return bool(self.start + self.tokens.stop - self.tokens.start == self.num_prompt_tokens)

    @property
    def pooled_tokens(self) -> slice:
        """Positions of its pooled tokens in the flat batch. Empty in a chunk that lies before
        `pooling_start`."""
        left_out = max(self.pooling_start - self.start, 0)
        return slice(min(self.tokens.start + left_out, self.tokens.stop), self.tokens.stop)


@dataclass(frozen=True, slots=True)
class PoolingMetadata:
    """A step's pooling rows, in the batch's order. Rows of generating sequences may lie between
    them."""

    rows: Sequence[PoolingRow]


class RowPooler(Pooler):
    """Makes a result of each row's hidden states. Arithmetic of heads is in float32."""

    def check(self, params: PoolingParams) -> None:
        """Raises RequestError, with `param` set, for what this pooler cannot give. `forward` takes
        checked rows only."""
        if params.task not in self.supported_tasks():
            able = ", ".join(sorted(self.supported_tasks()))
            raise RequestError(f"Unsupported task: {params.task!r}. Supported: {able}.", "task")

    @abstractmethod
    def forward(self, hidden_states: Tensor, meta: PoolingMetadata) -> list[Tensor | None]:
        """Hidden states [T, H] of the whole batch -> per row its float32 result, or None where it
        needs more chunks.

        embed: [D]; token_embed: [tokens, D]; classify: [labels]; token_classify: [tokens, labels];
        score: [1].
        """

    def make_part(
        self,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        *,
        plugins: Plugins,
        options: Any,
    ) -> RowPoolerPart:
        return RowPoolerPart(self, model, config, device, plugins=plugins, options=options)


class RowPoolerPart(PoolingPart):
    """The pooling sequences that the runner holds. One that comes back from a preemption begins
    anew."""

    def __init__(
        self,
        pooler: RowPooler,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        **arguments: Any,
    ) -> None:
        super().__init__(pooler, model, config, device, **arguments)
        self.pooler: RowPooler = pooler
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

    def finish(
        self, inputs: StepInputs, hidden_states: Tensor, result: StepResult, step: StepRun
    ) -> None:
        """Sequences that need more chunks have neither a result nor an error."""
        rows = {seq.seq_id: self._row(seq, index, inputs) for index, seq in self._rows(inputs)}
        if not rows:
            return
        pooled = self.pooler(hidden_states, PoolingMetadata(list(rows.values())))
        found = {
            seq_id: vector
            for seq_id, vector in zip(rows, pooled, strict=True)
            if vector is not None
        }
        for seq_id, values in zip(found, _on_host(list(found.values())), strict=True):
            if np.isfinite(values).all():
                result.pooled[seq_id] = Array.of(values)
            else:
                result.errors[seq_id] = "the model's result is not finite"

    def _rows(self, inputs: StepInputs) -> list[tuple[int, NewSequence]]:
        """The step's rows that pool, and their sequences."""
        if not self._sequences:
            return []
        found = [
            (index, self._sequences.get(scheduled.seq_id))
            for index, scheduled in enumerate(inputs.plan.scheduled)
        ]
        return [(index, seq) for index, seq in found if seq is not None]

    def _row(self, seq: NewSequence, index: int, inputs: StepInputs) -> PoolingRow:
        assert seq.inputs.pooling is not None
        tokens = slice(int(inputs.query_start[index]), int(inputs.query_start[index + 1]))
        start = int(inputs.starts[index])
        return PoolingRow(
            params=seq.inputs.pooling,
            tokens=tokens,
            token_ids=inputs.histories.tokens(int(inputs.rows[index]))[
                start : start + tokens.stop - tokens.start
            ],
            start=start,
            num_prompt_tokens=seq.num_prompt_tokens,
            pooling_start=seq.inputs.pooling_start,
            state=self._states[seq.seq_id],
        )


def _on_host(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """Each as float32, contiguous. All come from the device by one copy, for which the host
    waits."""
    values = [tensor.float().contiguous() for tensor in tensors]
    if not values or values[0].device.type == "cpu":
        return [tensor.numpy() for tensor in values]
    packed = torch.cat([tensor.flatten() for tensor in values]).cpu()
    parts = torch.split(packed, [tensor.numel() for tensor in values])
    return [part.view(tensor.shape).numpy() for part, tensor in zip(parts, values, strict=True)]
