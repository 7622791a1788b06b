"""The executor that runs one worker in the engine's own process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from msgspec import Raw

from toolkit_lm.config import VllmConfig
from toolkit_lm.executor.calls import WorkerAnswer, call_worker
from toolkit_lm.executor.contract import Executor
from toolkit_lm.kv import KVCacheConfig, KVCacheSpec
from toolkit_lm.messages import StepPlan, StepResult
from toolkit_lm.plugin import Plugins
from toolkit_lm.runner import ModelRunner, free_memory, on_device, profile, warm_up

Answer = TypeVar("Answer")


class InProcessExecutor(Executor):
    """One rank, without a process of its own. It sets neither the thread count nor the CPU affinity
    of its host application."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.runner = ModelRunner(config, plugins)
        self.max_in_flight = 2 if config.engine.overlap else 1
        self._on_device = on_device(self.runner.device)
        # The thread stays on that device.
        self._thread = (
            ThreadPoolExecutor(1, "toolkit_lm-runner", self._on_device.__enter__)
            if config.engine.overlap
            else None
        )

    def load(self) -> None:
        with self._on_device:
            self.runner.load()
            self._step_memory = profile(self.runner)

    def kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [self.runner.kv_cache_specs()]

    def backends(self) -> dict[str, str]:
        return {layer: selection.name for layer, selection in self.runner.selections.items()}

    def part_facts(self) -> dict[str, Raw]:
        return self.runner.parts.facts()

    def free_memory(self) -> int:
        return free_memory(self.runner.device) - self._step_memory

    def free_host_memory(self) -> int:
        return free_memory(torch.device("cpu"))

    def init_kv_cache(self, kv_caches: Sequence[KVCacheConfig]) -> None:
        (kv_cache,) = kv_caches
        with self._on_device:
            self.runner.init_kv_cache(kv_cache)

    def warm_up(self) -> None:
        with self._on_device:
            warm_up(self.runner)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        return self._submit(self.runner.execute, plan)

    def call(self, method: str, payload: Raw) -> Future[list[WorkerAnswer]]:
        return self._submit(lambda: [call_worker(self.runner, method, payload)])

    def _submit(self, call: Callable[..., Answer], *arguments: Any) -> Future[Answer]:
        if self._thread is not None:
            return self._thread.submit(call, *arguments)
        future: Future[Answer] = Future()
        try:
            with self._on_device:
                future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.runner.shutdown()
