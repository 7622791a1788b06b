"""The executor that runs one worker in the engine's own thread."""

from __future__ import annotations

from concurrent.futures import Future

from llm_toolkit.attention import KVCacheConfig, KVCacheSpec, Selection
from llm_toolkit.config import VllmConfig
from llm_toolkit.executor.contract import Executor
from llm_toolkit.messages import NewSequence, ScheduledSequence, StepPlan, StepResult
from llm_toolkit.params import SamplingParams
from llm_toolkit.plugin import Plugins
from llm_toolkit.runner import ModelRunner, kv_memory


class InProcessExecutor(Executor):
    """One rank, no process of its own. It sets neither the thread count nor the CPU affinity of its host app."""

    def __init__(self, config: VllmConfig, plugins: Plugins) -> None:
        self.config = config
        self.runner = ModelRunner(config, plugins)

    def load(self) -> None:
        self.runner.load()

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return self.runner.kv_cache_specs()

    def selections(self) -> dict[str, Selection]:
        return self.runner.selections

    def kv_memory(self) -> int:
        return kv_memory(self.config.cache, self.runner.device)

    def init_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        self.runner.init_kv_cache(kv_cache)

    def warm_up(self) -> None:
        """One prefill and one decode of a made-up sequence in block 0, then forgets it."""
        groups = len(self.runner.kv_cache_layout)
        new = NewSequence(
            seq_id=-1,
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_tables=[[0]] * groups,
            params=SamplingParams(temperature=0),
            seed=0,
            stop_token_ids=[],
        )
        row = ScheduledSequence(-1, 1, [[]] * groups, True)
        self.runner.execute(StepPlan(new=[new], scheduled=[row]))
        self.runner.execute(StepPlan(dropped=[-1]))

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        future: Future[StepResult] = Future()
        try:
            future.set_result(self.runner.execute(plan))
        except BaseException as error:
            future.set_exception(error)
        return future

    def check_health(self) -> None:
        """The worker is the engine's own thread: alive while the engine is."""

    def shutdown(self) -> None:
        self.runner.shutdown()
