"""Figures of the engine, of HTTP requests and of processes, for Prometheus."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter as Tally, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    generate_latest,
)
from toolkit_lm.events import Event, LoadEvent, RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl

from toolkit_lm_server.collectors import EngineProcesses
from toolkit_lm_server.figures import Figures
from toolkit_lm_server.metric_names import named
from toolkit_lm_server.queue_wait import QueueWait
from toolkit_lm_server.recent import Recent
from toolkit_lm_server.watched import Watched, total_load

if TYPE_CHECKING:
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.kv import KVCacheConfig

logger = logging.getLogger(__name__)
_ASKED_SECONDS = 1.0
"""Most seconds that figures of plugins may take."""
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

_STATUSES = ("starting", "ready", "stalled", "restarting", "dead", "closed")


@dataclass(slots=True)
class Totals:
    """Tokens since the start."""

    prompt: int = 0
    cached: int = 0
    output: int = 0


@dataclass(slots=True)
class LastStep:
    """The last step of an engine that gave tokens."""

    end: float = 0.0
    gap: float = 0.0
    """Seconds from the tokens of the step before to its own."""
    num_later: int = 0
    """Number of the step's tokens that are not a sequence's first."""


class Metrics:
    """A plugin that watches the engine's events. Give it to `AsyncLLM(config, plugins=[metrics])`,
    then to `create_app`.

    It has a registry of its own, so that two engines in one process do not collide.
    """

    name = "server-metrics"

    def __init__(self, *, model_name: str = "") -> None:
        """`model_name`: the label of all figures of the engine."""
        self.model_name = model_name
        self.recent = Recent()
        """The latest times to first tokens and between tokens."""
        self.totals = Totals()
        self.loads: dict[int, LoadEvent] = {}
        """The latest load of each engine."""
        self.queue_wait = QueueWait()
        self.tap: Callable[[Event], object] | None = None
        """A function that is called with each event, in the event's thread. It must not fail."""
        self.sources: list[Callable[[], Awaitable[object]]] = []
        """Functions of plugins that are awaited before figures are told. They bring the plugin's
        own figures in `registry` up to date."""
        self._steps: defaultdict[int, LastStep] = defaultdict(LastStep)
        """The last step of each engine."""
        self._engine_pids: list[int | None] = [None]
        """Process ids by engine."""
        self._num_restarts = 0
        """Restarts that have been counted."""
        self._media_lookups = (0, 0)
        """Lookups of media items, and those with success, that have been counted."""
        self._preempted: Tally[str] = Tally()
        """Preemptions of each request under way."""
        self.registry = CollectorRegistry()
        self._figures = Figures(self.registry)
        ProcessCollector(registry=self.registry)
        self.registry.register(EngineProcesses(lambda: self._engine_pids))

    @hookimpl
    def toolkit_event(self, event: Event) -> None:
        if self.tap is not None:
            self.tap(event)
        match event:
            case RequestEvent():
                self._request(event)
            case StepEvent():
                self._step(event)
            case LoadEvent():
                # It comes last, after the first tokens.
                last = self._steps[event.engine]
                engine = str(event.engine)
                if last.num_later > 0:
                    self._figures.between.observe(last.gap, last.num_later)
                    self.recent.between.append((last.gap, last.num_later))
                    last.num_later = 0
                before = self.loads.get(event.engine)
                known = {} if before is None else before.waiting_by_reason
                self.loads[event.engine] = event
                self.queue_wait.waiting(sum(load.num_waiting for load in self.loads.values()))
                for reason in {*known, *event.waiting_by_reason}:
                    count = event.waiting_by_reason.get(reason, 0)
                    self._figures.waiting_by_reason.labels(engine, reason).set(count)
                self._figures.running.labels(engine).set(event.num_running)
                self._figures.waiting.labels(engine).set(event.num_waiting)
                self._figures.cache_usage.labels(engine).set(
                    event.num_used_blocks / max(event.num_total_blocks, 1)
                )
                self._figures.host_usage.labels(engine).set(
                    event.num_used_host_blocks / max(event.num_total_host_blocks, 1)
                )

    @property
    def load(self) -> LoadEvent | None:
        """The latest load of all engines together. None before the first step."""
        return total_load(self.loads.copy().values())

    def fill(self, max_num_seqs: int) -> float:
        """The used part of the KV cache, or of the batch's rows, whichever is fuller: 0 to 1."""
        if (load := self.load) is None:
            return 0.0
        blocks = load.num_used_blocks / max(load.num_total_blocks, 1)
        return max(blocks, min(load.num_running / max_num_seqs, 1.0))

    def refused(self, status: int) -> None:
        """Counts a refused request by its `status`, where the server is the cause and not the
        request."""
        if status in (429, 503):
            self._figures.refused.labels(str(status)).inc()

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Counts an HTTP request that is over. `handler`: its route's template, of which there are
        few."""
        method = method if method in _METHODS else "other"
        self._figures.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._figures.http_time.labels(handler, method).observe(seconds)

    def asked(self, max_tokens: int | None, num_prompts: int) -> None:
        """Counts a request that generates. `max_tokens`: most tokens of each prompt's outputs.
        None: as many as there is room for."""
        if max_tokens is not None:
            for _ in range(num_prompts):
                self._figures.max_tokens.observe(max_tokens)

    async def ask(self) -> None:
        """Has plugins bring their figures up to date. One that takes too long, or fails, leaves
        them as they are."""
        for source in self.sources:
            try:
                await asyncio.wait_for(source(), _ASKED_SECONDS)
            except Exception as error:
                logger.warning("figures of a plugin are not up to date: %r", error)

    def observe(self, engine: Watched) -> None:
        """Reads figures of the engine that no event tells."""
        self.model_name = getattr(engine, "served_model_name", self.model_name)
        client = getattr(getattr(engine, "engine", None), "client", None)
        engines = getattr(engine, "engines", ())
        self._engine_pids = [engine.pid for engine in engines] or [
            getattr(getattr(client, "process", None), "pid", None)
        ]
        for number, health in enumerate(engines):
            self._figures.ready.labels(str(number)).set(health.status == "ready")
            self._figures.in_flight.labels(str(number)).set(health.num_tokens)
        status = engine.health().status
        for health in _STATUSES:
            self._figures.status.labels(health).set(health == status)
        self._figures.restarts.inc(max(engine.num_restarts - self._num_restarts, 0))
        self._num_restarts = engine.num_restarts
        self._figures.queued_tokens.set(engine.num_queued_tokens)
        self._figures.estimated_wait.set(self.queue_wait.seconds())
        # An engine with a processor has a config.
        config: Any = getattr(engine, "config", None)
        if config is not None:
            for number, load in self.loads.copy().items():
                used = load.num_running / config.scheduler.max_num_seqs
                self._figures.batch_usage.labels(str(number)).set(min(used, 1.0))
        self._count_media(engine)
        processor = getattr(engine, "processor", None)
        self._figures.kv_cache.clear()
        # It knows no tasks before the engine has been ready.
        if processor is not None and processor.tasks and processor.limits.kv_cache.pools:
            self._tell_kv_cache(processor.limits.kv_cache, config)

    def _count_media(self, engine: Watched) -> None:
        renderer = getattr(engine, "renderer", None)
        queries, hits = found = getattr(renderer, "media_lookups", self._media_lookups)
        self._figures.media_queries.inc(max(queries - self._media_lookups[0], 0))
        self._figures.media_hits.inc(max(hits - self._media_lookups[1], 0))
        self._media_lookups = found

    def _tell_kv_cache(self, kv_cache: KVCacheConfig, config: VllmConfig) -> None:
        fit = num_fitting(kv_cache, config)
        block_size = kv_cache.groups[0].spec.block_size
        num_blocks = sum(pool.num_blocks for pool in kv_cache.pools)
        self._figures.kv_cache.labels(
            block_size, num_blocks, int(fit * config.max_model_len), f"{fit:.2f}"
        ).set(1)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(
            named(self.registry, self.model_name, several=len(self._engine_pids) > 1)
        )

    def _step(self, event: StepEvent) -> None:
        self._figures.step_time.observe(event.duration)
        self._figures.step_tokens.observe(event.num_tokens)
        self._figures.generation_tokens.labels(str(event.engine)).inc(event.num_output_tokens)
        self._figures.compilations.labels(str(event.engine)).inc(event.num_compilations)
        self.totals.output += event.num_output_tokens
        self._drafts(event)
        last = self._steps[event.engine]
        last.end, before = event.time, last.end
        if event.num_output_tokens:
            # A sequence that runs gets tokens in each step, several where drafts are accepted.
            last.gap = (event.time - before) * event.num_output_sequences / event.num_output_tokens
            last.num_later = event.num_output_tokens

    def _drafts(self, event: StepEvent) -> None:
        engine = str(event.engine)
        for drafted, accepted in event.drafts:
            self._figures.drafts.labels(engine).inc()
            self._figures.draft_tokens.labels(engine).inc(drafted)
            self._figures.accepted_tokens.labels(engine).inc(accepted)
            for place in range(drafted):
                self._figures.draft_tokens_per_pos.labels(engine, place).inc()
                self._figures.accepted_tokens_per_pos.labels(engine, place).inc(place < accepted)
        for name, drafted, accepted in event.drafters:
            self._figures.drafter_tokens.labels(engine, name).inc(drafted)
            self._figures.drafter_accepted.labels(engine, name).inc(accepted)

    def _request(self, event: RequestEvent) -> None:
        since_arrival = event.time - event.arrival_time
        match event.kind:
            case "scheduled":
                self.queue_wait.begun()
                self._figures.queue_time.observe(since_arrival)
            case "preempted":
                self._figures.preemptions.labels(str(event.engine)).inc()
                self._preempted[event.request_id] += 1
            case "first_token":
                self._steps[event.engine].num_later -= event.num_sequences
                self._figures.first_token.observe(since_arrival)
                self.recent.first.append((since_arrival, 1))
                self._prompt(event)
            case "aborted":
                self._figures.aborted.labels(event.finish_reason).inc()
                self._preempted.pop(event.request_id, None)
            case "finished":
                self._figures.finished.labels(event.finish_reason).inc()
                if event.first_token_time is None and event.finish_reason != "error":
                    # Only what is pooled ends well without a token.
                    self._prompt(event)
                self._times(event)

    def _times(self, event: RequestEvent) -> None:
        """Observes the times and sizes of a request that has ended by itself."""
        self._figures.latency.observe(event.time - event.arrival_time)
        self._figures.prompt_length.observe(event.num_prompt_tokens)
        self._figures.output_length.observe(event.num_output_tokens)
        self._figures.sequences.observe(event.num_sequences)
        self._figures.request_preemptions.observe(self._preempted.pop(event.request_id, 0))
        if event.scheduled_time is not None:
            self._figures.inference.observe(event.time - event.scheduled_time)
        if event.first_token_time is None:
            return
        if event.scheduled_time is not None:
            self._figures.prefill.observe(event.first_token_time - event.scheduled_time)
        decode = event.time - event.first_token_time
        each = event.num_output_tokens / event.num_sequences
        self._figures.decode.observe(decode)
        if each > 1:
            self._figures.per_token.observe(decode / (each - 1))

    def _prompt(self, event: RequestEvent) -> None:
        engine = str(event.engine)
        self._figures.prompt_tokens.labels(engine).inc(event.num_prompt_tokens)
        self._figures.queries.labels(engine).inc(event.num_prompt_tokens)
        self._figures.hits.labels(engine).inc(event.num_cached_tokens)
        self.totals.prompt += event.num_prompt_tokens
        self.totals.cached += event.num_cached_tokens


def num_fitting(kv_cache: KVCacheConfig, config: VllmConfig) -> float:
    """Requests of the longest context that the KV cache has room for at a time."""
    needed = kv_cache.max_blocks(
        config.max_model_len, config.scheduler.token_budget, config.max_encoder_len
    )
    return min(
        (
            pool.num_blocks / count
            for pool, count in zip(kv_cache.pools, needed, strict=True)
            if count
        ),
        default=0.0,
    )
