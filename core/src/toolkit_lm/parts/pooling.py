"""Pooling as a part of a step: the tasks that the model's pooler serves."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from msgspec import Raw
from torch import nn

from toolkit_lm.attention import CacheLayer
from toolkit_lm.config import POOLING_TASKS, PoolingTask, VllmConfig
from toolkit_lm.messages import PoolingRules, SequenceInputs, StepPlan
from toolkit_lm.pooling import Pooler
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.step import StepPart


class PoolingPart(StepPart):
    """Base of the parts that `Pooler.make_part` returns. It states the pooler's tasks, and makes a
    warm-up pool."""

    def __init__(
        self,
        pooler: Pooler,
        model: nn.Module,
        config: VllmConfig,
        device: torch.device,
        **arguments: Any,
    ) -> None:
        """Takes the arguments of `make_part`, after the pooler."""
        super().__init__(model, config, device, **arguments)
        self.pooler = pooler

    def facts(self) -> Raw:
        """PoolingRules by PoolingTask, for the tasks that the model serves."""
        pooler = self.pooler
        # Layers that run apart from the forward pass do not see the prompt.
        apart = any("sequences" in part.feeds for part in self.model.parts.values())
        one_way = apart or all(
            layer.one_way for layer in self.model.modules() if isinstance(layer, CacheLayer)
        )
        rules = {
            task: PoolingRules(
                chunkable=one_way and pooler.chunkable(task),
                reads_prefix_cache=one_way and pooler.reads_prefix_cache(task),
                size=pooler.output_size(task),
            )
            for task in POOLING_TASKS
            if task in pooler.supported_tasks()
        }
        return Raw(msgspec.msgpack.encode(rules))

    def example(self, plan: StepPlan) -> None:
        """Makes a pooling engine's sequences pool for its first task."""
        if self.config.model.runner != "pooling":
            return
        tasks = self.pooler.supported_tasks()
        task: PoolingTask = next((task for task in POOLING_TASKS if task in tasks), "embed")
        for seq in plan.new:
            seq.inputs = SequenceInputs(pooling=PoolingParams(task=task))
