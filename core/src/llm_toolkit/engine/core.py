"""EngineCore: the loop. Tokens in, tokens out."""

from __future__ import annotations

import time

from llm_toolkit.attention import KVCacheConfig, block_bytes, group_layers
from llm_toolkit.config import VllmConfig
from llm_toolkit.errors import CapacityError
from llm_toolkit.events import StepEvent
from llm_toolkit.executor import Executor
from llm_toolkit.messages import EngineOutput, EngineRequest, FinishReason, StepPlan
from llm_toolkit.plugin import Plugins
from llm_toolkit.scheduler import Scheduler


class EngineCore:
    """Scheduler and executor, and nothing of texts. Used from one thread at a time; only `check` may be called from others."""

    def __init__(self, config: VllmConfig, plugins: Plugins, executor: Executor) -> None:
        self.config = config
        self.plugins = plugins
        self.executor = executor
        executor.load()
        self.kv_cache = self._plan_kv_cache()
        executor.init_kv_cache(self.kv_cache)
        executor.warm_up()
        self.scheduler = Scheduler(config, self.kv_cache)

    def _plan_kv_cache(self) -> KVCacheConfig:
        """How many blocks. Raises CapacityError when a single sequence of max_model_len does not fit."""
        groups = group_layers(self.executor.kv_cache_specs())
        cache, length = self.config.cache, self.config.max_model_len
        one_sequence = sum(-(-length // group.spec.block_size) for group in groups)
        if cache.num_kv_blocks is not None:
            num_blocks, given = cache.num_kv_blocks, f"num_kv_blocks is {cache.num_kv_blocks}"
        else:
            memory, each = self.executor.kv_memory(), block_bytes(groups)
            num_blocks = memory // each if each else 0
            given = f"kv_cache_memory ({cache.kv_cache_memory}) is {memory / 2**20:.0f} MiB, {num_blocks} blocks of {each / 2**10:.0f} KiB"
            # More than all sequences at full length is never used.
            num_blocks = min(num_blocks, one_sequence * self.config.scheduler.max_num_seqs)
        if num_blocks < one_sequence:
            raise CapacityError(
                f"the KV cache cannot hold one sequence of max_model_len {length} tokens, {one_sequence} blocks: {given}. "
                "Lower --max-model-len or give more memory with --kv-cache-memory."
            )
        return KVCacheConfig(num_blocks, groups)

    def check(self, request: EngineRequest) -> None:
        """Raises RequestError for a request that could never be served."""
        self.scheduler.check(request)

    def add_request(self, request: EngineRequest) -> None:
        """Queues a request. Raises RequestError."""
        self.scheduler.add(request)
        self._send_events()

    def finish(self, request_id: str, reason: FinishReason = "abort", index: int | None = None) -> None:
        """Ends a request, or one of its sequences, from outside. Its blocks are free at once."""
        self.scheduler.finish(request_id, reason, index)
        self._send_events()

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def step(self) -> list[EngineOutput]:
        """Plans, computes and takes in one step. Call it while `has_unfinished`."""
        start = time.monotonic()
        plan = self.scheduler.schedule()
        outputs = self.scheduler.update(plan, self.executor.execute(plan).result())
        self._send_events(plan, start)
        return outputs

    def shutdown(self) -> None:
        self.executor.shutdown()

    def _send_events(self, plan: StepPlan | None = None, start: float = 0.0) -> None:
        events, self.scheduler.events = self.scheduler.events, []
        if not self.plugins.has_event_listeners:
            return
        for event in events:
            self.plugins.event(event)
        pool = self.scheduler.blocks.pool
        now = time.monotonic()
        self.plugins.event(
            StepEvent(
                time=now,
                duration=now - start if plan is not None else 0.0,
                num_tokens=plan.num_tokens if plan is not None else 0,
                num_running=self.scheduler.num_running,
                num_waiting=len(self.scheduler.waiting),
                num_used_blocks=pool.num_used,
                num_total_blocks=pool.num_blocks,
            )
        )
