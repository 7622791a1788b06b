"""The executor that runs one worker in the engine's own process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from toolkit_lm.attention import KVCacheConfig, KVCacheSpec, Selection
from toolkit_lm.config import VllmConfig
from toolkit_lm.config.tasks import PoolingTask
from toolkit_lm.executor.contract import Executor
from toolkit_lm.messages import NewSequence, PoolingRules, ScheduledSequence, SequenceInputs, StepPlan, StepResult
from toolkit_lm.params import SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.pooling_params import PoolingParams
from toolkit_lm.runner import ModelRunner, free_memory

_KEPT_BYTES = 2**25 - 2**16
"""A little below the most that glibc adapts to."""


class InProcessExecutor(Executor):
    """One rank, no process of its own. It sets neither the thread count nor the CPU affinity of its host app."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.config = config
        self.runner = ModelRunner(config, plugins)
        self.max_in_flight = 2 if config.engine.overlap else 1
        self._thread = ThreadPoolExecutor(1, "toolkit_lm-runner") if config.engine.overlap else None

    def load(self) -> None:
        self.runner.load()

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    def selections(self) -> dict[str, Selection]:
        return self.runner.selections

    def pooling_rules(self) -> dict[PoolingTask, PoolingRules]:
        return self.runner.pooling_rules()

    def free_memory(self) -> int:
        return free_memory(self.runner.device)

    def free_host_memory(self) -> int:
        return free_memory(torch.device("cpu"))

    def init_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        self.runner.init_kv_cache(kv_cache)

    def warm_up(self) -> None:
        """A prompt of two tokens, and where text is generated a decode, of a made-up sequence that is then forgotten.

        They leave garbage in the first blocks.
        """
        if self.runner.device.type == "cpu":
            # Once glibc has seen an allocation of this size freed, it keeps the memory of activations instead of asking for its pages anew.
            torch.empty(_KEPT_BYTES, dtype=torch.uint8)
        tables = [list(range(-(-3 // group.spec.block_size))) for group in self.runner.kv_cache.groups]
        tasks = list(self.runner.pooling_rules())
        generates = self.config.model.runner != "pooling"
        new = NewSequence(
            seq_id=-1,
            token_ids=[0, 0],
            num_prompt_tokens=2,
            num_computed_tokens=0,
            block_tables=tables,
            params=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=[],
            inputs=SequenceInputs(pooling=None if generates else PoolingParams(task=tasks[0])),
        )
        nothing_new: list[list[int]] = [[] for _ in tables]
        self.runner.execute(StepPlan(new=[new], scheduled=[ScheduledSequence(-1, 2, nothing_new, generates)]))
        if generates:
            self.runner.execute(StepPlan(scheduled=[ScheduledSequence(-1, 1, nothing_new, True)]))
        self.runner.execute(StepPlan(dropped=[-1]))

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        if self._thread is not None:
            return self._thread.submit(self.runner.execute, plan)
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.runner.execute(plan))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.runner.shutdown()
