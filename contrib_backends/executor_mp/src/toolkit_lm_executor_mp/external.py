"""The executor of a process that is one of an engine's ranks: a launcher, such as torchrun, starts
them all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed
from msgspec import Raw
from msgspec.structs import replace
from toolkit_lm.config import VllmConfig
from toolkit_lm.distributed import Group, parallel_groups
from toolkit_lm.errors import ConfigError, EngineDeadError, UnsupportedError
from toolkit_lm.executor import InProcessExecutor, WorkerAnswer
from toolkit_lm.kv import KVCacheConfig
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Plugins

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.torch_group import TorchGroup

_dist: Any = torch.distributed
"""torch.distributed as Any: its type stubs cover only a part of it."""


class ExternalLauncherExecutor(InProcessExecutor):
    """One rank of a tensor-parallel engine, in the caller's process.

    Every rank has an engine of its own, and gives it the same requests in the same order: nothing
    but the collectives of layers goes from one rank to another. Ranks compare their plans before
    each step.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are the launcher's. Of a world of several engines,
    each has consecutive ranks.
    """

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        """Raises ConfigError without the launcher's variables, UnsupportedError for pipeline
        parallel ranks."""
        size = config.parallel.tensor_parallel_size
        if config.parallel.pipeline_parallel_size > 1:
            raise UnsupportedError(
                "executor 'external_launcher' runs tensor parallel ranks: pipeline_parallel_size "
                "must be 1. Able: mp."
            )
        self._group, self._leaves = (Group(), False) if size == 1 else _join(size, config)
        # All work is in the caller's thread, whose groups these are.
        config = replace(config, engine=replace(config.engine, overlap=False))
        if torch.device(config.device.device) == torch.device("cuda"):
            local = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
            config = replace(config, device=replace(config.device, device=local))
        super().__init__(config.with_rank(self._group.rank), plugins)

    def _grouped(self) -> Any:
        return parallel_groups(tensor=self._group)

    def load(self) -> None:
        with self._grouped():
            super().load()

    def free_memory(self) -> int:
        return self._least(super().free_memory())

    def free_host_memory(self) -> int:
        return self._least(super().free_host_memory()) // self._group.size

    def _least(self, value: int) -> int:
        device = self.runner.device
        return int(self._group.all_gather(torch.tensor([value], device=device), 0).min())

    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        with self._grouped():
            super().init_kv_cache(kv_caches)

    def warm_up(self) -> None:
        with self._grouped():
            super().warm_up()

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        with self._grouped():
            self._compare(plan)
            return super().execute(plan)

    def call(self, method: str, payload: Raw) -> Future[list[WorkerAnswer]]:
        """Calls a method on this rank alone: the others are called by their own processes."""
        with self._grouped():
            return super().call(method, payload)

    def _compare(self, plan: StepPlan) -> None:
        """Raises EngineDeadError if another rank has another plan."""
        if self._group.size == 1:
            return
        digest = hashlib.blake2b(wire.encode(plan), digest_size=7).digest()
        number = torch.tensor([int.from_bytes(digest)], device=self.runner.device)
        if len(set(self._group.all_gather(number, 0).tolist())) > 1:
            raise EngineDeadError(
                "the ranks of the external launcher have planned different steps. Give each the "
                "same prompts and parameters in the same order, and a seed."
            )

    def shutdown(self) -> None:
        super().shutdown()
        if isinstance(self._group, TorchGroup):
            self._group.close()
        if self._leaves:
            self._leaves = False
            _dist.destroy_process_group()


def _join(size: int, config: VllmConfig) -> tuple[TorchGroup, bool]:
    """Joins the group of this rank's engine. Also returns whether the world was joined for it."""
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    is_here = _dist.is_initialized()
    if missing and not is_here:
        raise ConfigError(
            f"executor 'external_launcher': {', '.join(missing)} is not set. Start every rank by a "
            "launcher such as torchrun, or choose executor='mp', which starts its workers."
        )
    device = torch.device(config.device.device)
    kind = "nccl" if device.type == "cuda" else "gloo"
    if not is_here:
        _dist.init_process_group(kind, init_method="env://")
    world = _dist.get_world_size()
    if world % size:
        raise ConfigError(
            f"executor 'external_launcher': {world} ranks cannot be divided into engines of "
            f"tensor_parallel_size {size}."
        )
    groups = [
        # All ranks make all groups, in the same order.
        _dist.new_group(list(range(first, first + size)), backend=kind)
        for first in range(0, world, size)
    ]
    return TorchGroup(groups[_dist.get_rank() // size], device, None), not is_here
