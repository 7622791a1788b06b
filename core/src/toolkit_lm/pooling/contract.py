"""The contract of poolers: from hidden states to what a pooling request gets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.errors import RequestError
from toolkit_lm.pooling_params import PoolingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingRow:
    """One sequence's part of a step."""

    params: PoolingParams
    tokens: slice
    """Where its tokens of this step are in the flat batch."""
    token_ids: np.ndarray
    """[number of these tokens] int32."""
    start: int
    """Position of the first of them: more than 0 in later chunks of a prompt, and where the beginning was in the prefix cache."""
    num_prompt_tokens: int
    pooling_start: int = 0
    """embed: position of the prompt's first token that is pooled; those before have no part in its vector."""
    state: dict[str, Any] = field(default_factory=dict)
    """What a pooler keeps of a sequence between its chunks. Empty at the first."""

    @property
    def finished(self) -> bool:
        """These are its last tokens."""
        return bool(self.start + self.tokens.stop - self.tokens.start == self.num_prompt_tokens)

    @property
    def pooled_tokens(self) -> slice:
        """Where those of its tokens that are pooled are in the flat batch. Empty in a chunk that lies before `pooling_start`."""
        left_out = max(self.pooling_start - self.start, 0)
        return slice(min(self.tokens.start + left_out, self.tokens.stop), self.tokens.stop)


@dataclass(frozen=True, slots=True)
class PoolingMetadata:
    """A step's pooling rows, in the batch's order. Rows of generating sequences may lie between them."""

    rows: Sequence[PoolingRow]


class Pooler(nn.Module, ABC):
    """Makes a result of each sequence's hidden states. Arithmetic of heads is in float32."""

    @abstractmethod
    def supported_tasks(self) -> frozenset[PoolingTask]:
        """The tasks whose rows it takes."""

    @abstractmethod
    def reads_prefix_cache(self, task: PoolingTask) -> bool:
        """A row of this task may begin in the middle: nothing of the hidden states before, which no cache holds, is needed."""

    @abstractmethod
    def chunkable(self, task: PoolingTask) -> bool:
        """A row of this task may come in several chunks (of a causal model; bidirectional ones are never cut)."""

    def check(self, params: PoolingParams) -> None:
        """Raises RequestError, with `param` set, for what this pooler cannot give. `forward` takes checked rows only."""
        if params.task not in self.supported_tasks():
            able = ", ".join(sorted(self.supported_tasks()))
            raise RequestError(f"the model does not support the task {params.task!r}. Supported: {able}.", "task")

    def output_size(self, task: PoolingTask) -> int | None:
        """Size of the last axis of a task's results, before `dimensions`; None: not known."""
        return None

    @abstractmethod
    def forward(self, hidden_states: Tensor, meta: PoolingMetadata) -> list[Tensor | None]:
        """Hidden states [T, H] of the whole batch -> per row its float32 result, or None where it needs more chunks.

        embed: [D]; token_embed: [tokens, D]; classify: [labels]; token_classify: [tokens, labels]; score: [1].
        """
