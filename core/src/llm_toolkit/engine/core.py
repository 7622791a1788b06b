"""EngineCore: the loop. Tokens in, tokens out."""

from __future__ import annotations

import time

from llm_toolkit.attention import KVCacheConfig, block_bytes, group_layers
from llm_toolkit.config import VllmConfig
from llm_toolkit.engine.memory import kv_cache_bytes
from llm_toolkit.engine.parameters import check_token_ids
from llm_toolkit.errors import CapacityError
from llm_toolkit.events import LoadEvent, StepEvent
from llm_toolkit.executor import Executor
from llm_toolkit.messages import EngineOutput, EngineRequest, FinishReason
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
        """How many blocks. Raises CapacityError when they do not fit, or a single sequence of max_model_len does not fit in them."""
        backends = {layer: selection.name for layer, selection in self.executor.selections().items()}
        groups = group_layers(self.executor.kv_cache_specs(), backends)
        cache, length, chunk = self.config.cache, self.config.max_model_len, self.config.scheduler.max_num_batched_tokens
        each, one_sequence = block_bytes(groups), sum(group.spec.blocks_for(length, chunk) for group in groups)
        free = self.executor.free_memory()
        memory = kv_cache_bytes(cache, self.config.device.device, free) if cache.num_kv_blocks is None else cache.num_kv_blocks * each
        if memory > free:
            device = self.config.device.device
            raise CapacityError(f"the KV cache is to take {memory / 2**20:.0f} MiB, but {device} has {free / 2**20:.0f} MiB free.")
        num_blocks = memory // each if each else 0
        if num_blocks < one_sequence:
            given = f"num_kv_blocks is {num_blocks}"
            if cache.num_kv_blocks is None:
                given = f"kv_cache_memory is {memory / 2**10:.0f} KiB, {num_blocks} blocks of {each / 2**10:.0f} KiB"
            option = "--kv-cache-memory" if cache.num_kv_blocks is None else "--num-kv-blocks"
            raise CapacityError(
                f"the KV cache cannot hold one sequence of max_model_len {length} tokens, {one_sequence} blocks: {given}. "
                f"Lower --max-model-len or raise {option}."
            )
        # More than all sequences at full length is never used.
        return KVCacheConfig(min(num_blocks, one_sequence * self.config.scheduler.max_num_seqs), groups)

    def check(self, request: EngineRequest) -> None:
        """Raises RequestError for a request that could never be served. May be called from any thread."""
        check_token_ids(request, self.config.hf_config.get("vocab_size"))
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
        try:
            result = self.executor.execute(plan).result()
        except BaseException:
            # An interrupt, say: the next step begins anew.
            self.scheduler.give_up(plan)
            raise
        outputs = self.scheduler.update(plan, result)
        if self.plugins.has_event_listeners:
            now = time.monotonic()
            self.plugins.event(StepEvent(time=now, duration=now - start, num_tokens=plan.num_tokens))
        self._send_events()
        return outputs

    def shutdown(self) -> None:
        self.executor.shutdown()

    def _send_events(self) -> None:
        events, self.scheduler.events = self.scheduler.events, []
        if not self.plugins.has_event_listeners:
            return
        pool = self.scheduler.blocks.pool
        load = LoadEvent(
            time=time.monotonic(),
            num_running=self.scheduler.num_running,
            num_waiting=len(self.scheduler.waiting),
            num_used_blocks=pool.num_used,
            num_total_blocks=pool.num_blocks,
        )
        for event in events:
            self.plugins.event(event)
        self.plugins.event(load)
