"""The contract of poolers: from hidden states to the results of pooling requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.plugin import Plugins
from toolkit_lm.step import StepPart


class Pooler(nn.Module, ABC):
    """Base class of a pooling model's `pooler`. The library toolkit_lm_poolers has the usual
    ones."""

    @abstractmethod
    def supported_tasks(self) -> frozenset[PoolingTask]:
        """The tasks whose rows the pooler takes."""

    @abstractmethod
    def reads_prefix_cache(self, task: PoolingTask) -> bool:
        """Whether a row of this task may begin after a cached prefix. The pooler then needs none of
        the earlier hidden states, which no cache holds."""

    @abstractmethod
    def chunkable(self, task: PoolingTask) -> bool:
        """Whether a row of this task may come in several chunks (of a causal model; bidirectional
        ones are never cut)."""

    def output_size(self, task: PoolingTask) -> int | None:
        """Size of the last axis of a task's results, before `dimensions`; None: unknown."""
        return None

    @abstractmethod
    def make_part(
        self,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        *,
        plugins: Plugins,
        options: Any,
    ) -> StepPart:
        """Makes the part that keeps a runner's state of sequences with `inputs.pooling`, until
        their results are in `StepResult.pooled`.

        Results are in float32. embed: [D]; token_embed: [tokens, D]; classify: [labels];
        token_classify: [tokens, labels]; score: [1].
        """
