"""Figures of the engine, of HTTP requests and of processes, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Tally, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from toolkit_lm.events import Event, LoadEvent, RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl

from toolkit_lm_server.metric_names import ENGINE, named
from toolkit_lm_server.options import MetricNames

if TYPE_CHECKING:
    from toolkit_lm.attention import KVCacheConfig
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.frontend import Health

_LATENCY = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
    640.0,
)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (*_TOKENS, 32768, 65536, 131072, 262144)
_FEW = (1, 2, 5, 10, 20)
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

Kind = TypeVar("Kind", Counter, Gauge)

_STATUSES = ("starting", "ready", "stalled", "restarting", "dead", "closed")


class Watched(Protocol):
    """An AsyncLLM, or what stands for one that is being made."""

    def health(self) -> Health: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


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
    """Seconds to its tokens from those before them."""
    num_later: int = 0
    """How many of its tokens were no sequence's first."""


def total_load(loads: Iterable[LoadEvent]) -> LoadEvent | None:
    """Of several engines together; None of none."""
    found = list(loads)
    if len(found) < 2:
        return found[0] if found else None
    counts = [name for name in LoadEvent.__struct_fields__ if name.startswith("num_")]
    return LoadEvent(
        time=max(one.time for one in found),
        **{name: sum(getattr(one, name) for one in found) for name in counts},
    )


class EngineProcesses(Collector):
    """What the system says of engine processes: memory, CPU time, open files."""

    def __init__(self, pids: Callable[[], Sequence[int | None]]) -> None:
        """`pids`: by engine; None: it has no process."""
        self._pids = pids

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, pid in enumerate(self._pids()):
            # It reads what it is given at once; 0 is no process.
            for family in ProcessCollector(
                "toolkit_lm_engine", pid=partial(int, pid or 0), registry=None
            ).collect():
                its = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                its.samples += [
                    one._replace(labels={**one.labels, ENGINE: str(number)})
                    for one in family.samples
                ]
        yield from families.values()


class Intervals(Collector):
    """A histogram of seconds that takes as many equal values at once as one likes."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help
        self._counts = [0] * (len(_LATENCY) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int) -> None:
        """So many times."""
        self._counts[bisect_left(_LATENCY, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in _LATENCY), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


class Metrics:
    """A plugin that watches the engine's events: give it to `AsyncLLM(config, plugins=[metrics])`,
    then to `create_app`.

    It keeps a registry of its own, so that two engines in one process do not meet.
    """

    name = "server-metrics"

    def __init__(self, *, model_name: str = "", names: MetricNames = "toolkit-lm") -> None:
        """`model_name`: the label of all figures of the engine. `names`: whose names they have."""
        self.model_name = model_name
        self.totals = Totals()
        self.loads: dict[int, LoadEvent] = {}
        """The latest of each engine."""
        self.tap: Callable[[Event], object] | None = None
        """Called with each event, in the thread that it comes in. It must not fail."""
        self._names = names
        self._steps: defaultdict[int, LastStep] = defaultdict(LastStep)
        """By engine."""
        self._engine_pids: list[int | None] = [None]
        """By engine."""
        self._preempted: Tally[str] = Tally()
        """By request under way, how often it was preempted."""
        self.registry = CollectorRegistry()
        its = self._of_engine
        self._running = its(
            Gauge,
            "num_sequences_running",
            "Sequences of the requests that have a place in the batch.",
        )
        self._waiting = its(
            Gauge, "num_requests_waiting", "Requests that wait for a place in the batch."
        )
        self._cache_usage = its(
            Gauge, "kv_cache_usage_ratio", "Used part of the KV cache blocks, 0 to 1."
        )
        self._host_usage = its(
            Gauge,
            "kv_cache_host_usage_ratio",
            "Used part of the host blocks that requests are swapped to, 0 to 1.",
        )
        self._queued_tokens = self._gauge(
            "num_prompt_tokens_waiting", "Prompt tokens of the requests that wait."
        )
        self._restarts = self._gauge(
            "engine_restarts", "How many times a dead engine process was started anew."
        )
        self._status = Gauge(
            "toolkit_lm_engine_status",
            "1 for the engine's status, 0 for others.",
            ["status"],
            registry=self.registry,
        )
        self._ready = Gauge(
            "toolkit_lm_engine_ready",
            "Of several engines: 1 for one that serves.",
            ["engine"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "toolkit_lm_engine_tokens_in_flight",
            "Of several engines: tokens of prompts and outputs of the requests that one has.",
            ["engine"],
            registry=self.registry,
        )
        self._preemptions = its(
            Counter,
            "preemptions",
            "Requests that lost their place in the batch for want of blocks.",
        )
        self._prompt_tokens = its(
            Counter,
            "prompt_tokens",
            "Prompt tokens of the requests that got a first token, or were pooled.",
        )
        self._queries = its(
            Counter,
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache.",
        )
        self._hits = its(
            Counter,
            "prefix_cache_hits",
            "Of these, tokens whose keys and values were in the cache.",
        )
        self._generation_tokens = its(Counter, "generation_tokens", "Output tokens, as they come.")
        self._compilations = its(
            Counter,
            "compilations_after_ready",
            "Graphs that torch compiled while requests waited. It should stay 0.",
        )
        self._finished = Counter(
            "toolkit_lm_requests_finished",
            "Ended requests of the engine, by reason: each input of an HTTP request is one.",
            ["reason"],
            registry=self.registry,
        )
        self._aborted = Counter(
            "toolkit_lm_requests_aborted",
            "Requests ended from outside, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self._refused = Counter(
            "toolkit_lm_requests_refused",
            "Requests not taken, by HTTP status.",
            ["status"],
            registry=self.registry,
        )
        self._queue_time = self._seconds(
            "request_queue_time_seconds", "From arrival to a place in the batch."
        )
        self._first_token = self._seconds(
            "time_to_first_token_seconds", "From arrival to the first output token."
        )
        self._between = Intervals(
            "toolkit_lm_inter_token_latency_seconds",
            "Seconds: From one token of a sequence to the next.",
            self.registry,
        )
        self._per_token = self._seconds(
            "time_per_output_token_seconds",
            "Mean time of a request's output tokens after the first.",
        )
        self._prefill = self._seconds(
            "request_prefill_time_seconds", "From a place in the batch to the first output token."
        )
        self._decode = self._seconds(
            "request_decode_time_seconds", "From the first output token to the end."
        )
        self._inference = self._seconds(
            "request_inference_time_seconds", "From a place in the batch to the end."
        )
        self._latency = self._seconds("e2e_request_latency_seconds", "From arrival to the end.")
        self._prompt_length = self._lengths(
            "request_prompt_tokens", "Prompt tokens of an ended request."
        )
        self._output_length = self._lengths(
            "request_generation_tokens", "Output tokens of an ended request, over its sequences."
        )
        self._sequences = self._numbers(
            "request_sequences", "Sequences of an ended request, its n.", _FEW
        )
        self._max_tokens = self._lengths(
            "request_max_tokens", "Output tokens that a request allows, where it says how many."
        )
        self._request_preemptions = self._numbers(
            "request_preemptions", "How often an ended request was preempted.", (0, *_FEW)
        )
        self._kv_cache = Gauge(
            "toolkit_lm_kv_cache_info",
            "1. The labels tell the size of the KV cache: tokens, and requests of the longest "
            "context, that have room at a time.",
            ["block_size", "num_blocks", "size_tokens", "max_concurrency"],
            registry=self.registry,
        )
        self._step_time = self._seconds("step_duration_seconds", "Of one step of the engine.")
        self._step_tokens = Histogram(
            "toolkit_lm_step_tokens",
            "Tokens computed in one step of the engine.",
            buckets=_TOKENS,
            registry=self.registry,
        )
        self._http_requests = Counter(
            "http_requests",
            "HTTP requests, by route, method and class of status.",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self._http_time = Histogram(
            "http_request_duration_seconds",
            "Seconds: From a request's headers to its answer's end.",
            ["handler", "method"],
            buckets=_LATENCY,
            registry=self.registry,
        )
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
                    self._between.observe(last.gap, last.num_later)
                    last.num_later = 0
                self.loads[event.engine] = event
                self._running.labels(engine).set(event.num_running)
                self._waiting.labels(engine).set(event.num_waiting)
                self._cache_usage.labels(engine).set(
                    event.num_used_blocks / max(event.num_total_blocks, 1)
                )
                self._host_usage.labels(engine).set(
                    event.num_used_host_blocks / max(event.num_total_host_blocks, 1)
                )

    @property
    def load(self) -> LoadEvent | None:
        """The latest, of all engines together; None before the first step."""
        return total_load(self.loads.copy().values())

    def refused(self, status: int) -> None:
        """A request was answered with `status`; it counts where the server, not the request, is the
        reason."""
        if status in (429, 503):
            self._refused.labels(str(status)).inc()

    def answered(self, handler: str, method: str, status: int, seconds: float) -> None:
        """An HTTP request is over. `handler`: its route's template, of which there are few."""
        method = method if method in _METHODS else "other"
        self._http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._http_time.labels(handler, method).observe(seconds)

    def asked(self, max_tokens: int | None, num_prompts: int) -> None:
        """The engine is asked for at most so many tokens of each of some prompts. None: of as many
        as there is room for."""
        if max_tokens is not None:
            for _ in range(num_prompts):
                self._max_tokens.observe(max_tokens)

    def observe(self, engine: Watched) -> None:
        """Takes in what no event tells."""
        self.model_name = getattr(engine, "served_model_name", self.model_name)
        client = getattr(getattr(engine, "engine", None), "client", None)
        engines = getattr(engine, "engines", ())
        self._engine_pids = [one.pid for one in engines] or [
            getattr(getattr(client, "process", None), "pid", None)
        ]
        for number, one in enumerate(engines):
            self._ready.labels(str(number)).set(one.status == "ready")
            self._in_flight.labels(str(number)).set(one.num_tokens)
        status = engine.health().status
        for one in _STATUSES:
            self._status.labels(one).set(one == status)
        self._restarts.set(engine.num_restarts)
        self._queued_tokens.set(engine.num_queued_tokens)
        processor = getattr(engine, "processor", None)
        self._kv_cache.clear()
        # It knows no tasks before the engine has been ready.
        if processor is not None and processor.tasks and processor.limits.kv_cache.pools:
            self._tell_kv_cache(processor.limits.kv_cache, engine.config)  # type: ignore[attr-defined]  # What has a processor has a config.

    def _tell_kv_cache(self, kv_cache: KVCacheConfig, config: VllmConfig) -> None:
        fit = num_fitting(kv_cache, config)
        block_size = kv_cache.groups[0].spec.block_size
        num_blocks = sum(pool.num_blocks for pool in kv_cache.pools)
        self._kv_cache.labels(
            block_size, num_blocks, int(fit * config.max_model_len), f"{fit:.2f}"
        ).set(1)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(
            named(self.registry, self._names, self.model_name, several=len(self._engine_pids) > 1)
        )

    def _step(self, event: StepEvent) -> None:
        self._step_time.observe(event.duration)
        self._step_tokens.observe(event.num_tokens)
        self._generation_tokens.labels(str(event.engine)).inc(event.num_output_tokens)
        self._compilations.labels(str(event.engine)).inc(event.num_compilations)
        self.totals.output += event.num_output_tokens
        last = self._steps[event.engine]
        last.end, before = event.time, last.end
        if event.num_output_tokens:
            # A sequence that runs gets tokens in each step, several where drafts are accepted.
            last.gap = (event.time - before) * event.num_output_sequences / event.num_output_tokens
            last.num_later = event.num_output_tokens

    def _request(self, event: RequestEvent) -> None:
        since_arrival = event.time - event.arrival_time
        match event.kind:
            case "scheduled":
                self._queue_time.observe(since_arrival)
            case "preempted":
                self._preemptions.labels(str(event.engine)).inc()
                self._preempted[event.request_id] += 1
            case "first_token":
                self._steps[event.engine].num_later -= event.num_sequences
                self._first_token.observe(since_arrival)
                self._prompt(event)
            case "aborted":
                self._aborted.labels(event.finish_reason).inc()
                self._preempted.pop(event.request_id, None)
            case "finished":
                self._finished.labels(event.finish_reason).inc()
                if event.first_token_time is None and event.finish_reason != "error":
                    # Only what is pooled ends well without a token.
                    self._prompt(event)
                self._times(event)

    def _times(self, event: RequestEvent) -> None:
        """Of a request that has ended by itself."""
        self._latency.observe(event.time - event.arrival_time)
        self._prompt_length.observe(event.num_prompt_tokens)
        self._output_length.observe(event.num_output_tokens)
        self._sequences.observe(event.num_sequences)
        self._request_preemptions.observe(self._preempted.pop(event.request_id, 0))
        if event.scheduled_time is not None:
            self._inference.observe(event.time - event.scheduled_time)
        if event.first_token_time is None:
            return
        if event.scheduled_time is not None:
            self._prefill.observe(event.first_token_time - event.scheduled_time)
        decode = event.time - event.first_token_time
        each = event.num_output_tokens / event.num_sequences
        self._decode.observe(decode)
        if each > 1:
            self._per_token.observe(decode / (each - 1))

    def _prompt(self, event: RequestEvent) -> None:
        engine = str(event.engine)
        self._prompt_tokens.labels(engine).inc(event.num_prompt_tokens)
        self._queries.labels(engine).inc(event.num_prompt_tokens)
        self._hits.labels(engine).inc(event.num_cached_tokens)
        self.totals.prompt += event.num_prompt_tokens
        self.totals.cached += event.num_cached_tokens

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"toolkit_lm_{name}", help, registry=self.registry)

    def _of_engine(self, kind: type[Kind], name: str, help: str) -> Kind:
        """With a label that says which engine. The first is told from the start."""
        made = kind(f"toolkit_lm_{name}", help, [ENGINE], registry=self.registry)
        made.labels("0")
        return made

    def _seconds(self, name: str, help: str) -> Histogram:
        return Histogram(
            f"toolkit_lm_{name}", f"Seconds: {help}", buckets=_LATENCY, registry=self.registry
        )

    def _lengths(self, name: str, help: str) -> Histogram:
        return self._numbers(name, help, _LENGTHS)

    def _numbers(self, name: str, help: str, buckets: Sequence[int]) -> Histogram:
        return Histogram(f"toolkit_lm_{name}", help, buckets=buckets, registry=self.registry)


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
