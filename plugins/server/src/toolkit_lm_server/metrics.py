"""Figures of the engine for Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from toolkit_lm.events import Event, LoadEvent, RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    from toolkit_lm.frontend.health import Health

_LATENCY = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_STATUSES = ("starting", "ready", "stalled", "restarting", "dead", "closed")


class Watched(Protocol):
    """An AsyncLLM, or what stands for one that is being made."""

    def health(self) -> Health: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def num_queued_tokens(self) -> int: ...


class Metrics:
    """A plugin that watches the engine's events: give it to `AsyncLLM(config, plugins=[metrics])`, then to `create_app`.

    It keeps a registry of its own, so that two engines in one process do not meet.
    """

    name = "server-metrics"

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._running = self._gauge("num_sequences_running", "Sequences of the requests that have a place in the batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a place in the batch.")
        self._cache_usage = self._gauge("kv_cache_usage_ratio", "Used part of the KV cache blocks, 0 to 1.")
        self._host_usage = self._gauge("kv_cache_host_usage_ratio", "Used part of the host blocks that requests are swapped to, 0 to 1.")
        self._queued_tokens = self._gauge("num_prompt_tokens_waiting", "Prompt tokens of the requests that wait.")
        self._restarts = self._gauge("engine_restarts", "How many times a dead engine process was started anew.")
        self._status = Gauge("toolkit_lm_engine_status", "1 for the engine's status, 0 for others.", ["status"], registry=self.registry)
        self._preemptions = self._counter("preemptions", "Requests that lost their place in the batch for want of blocks.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the requests that got a first token, or were pooled.")
        self._cached_tokens = self._counter("cached_prompt_tokens", "Of these, tokens whose keys and values were in the cache.")
        self._hits = self._counter("prefix_cache_hits", "Requests of which a part of the prompt was in the cache.")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens of ended requests.")
        self._finished = Counter(
            "toolkit_lm_requests_finished",
            "Ended requests of the engine, by reason: each input of an HTTP request is one.",
            ["reason"],
            registry=self.registry,
        )
        self._aborted = Counter(
            "toolkit_lm_requests_aborted", "Requests ended from outside, by reason.", ["reason"], registry=self.registry
        )
        self._refused = Counter("toolkit_lm_requests_refused", "Requests not taken, by HTTP status.", ["status"], registry=self.registry)
        self._queue_time = self._seconds("request_queue_time_seconds", "From arrival to a place in the batch.")
        self._first_token = self._seconds("time_to_first_token_seconds", "From arrival to the first output token.")
        self._per_token = self._seconds("time_per_output_token_seconds", "Mean time of a request's output tokens after the first.")
        self._latency = self._seconds("e2e_request_latency_seconds", "From arrival to the end.")
        self._step_time = self._seconds("step_duration_seconds", "Of one step of the engine.")
        self._step_tokens = Histogram(
            "toolkit_lm_step_tokens", "Tokens computed in one step of the engine.", buckets=_TOKENS, registry=self.registry
        )

    @hookimpl
    def toolkit_event(self, event: Event) -> None:
        match event:
            case RequestEvent():
                self._request(event)
            case StepEvent():
                self._step_time.observe(event.duration)
                self._step_tokens.observe(event.num_tokens)
            case LoadEvent():
                self._running.set(event.num_running)
                self._waiting.set(event.num_waiting)
                self._cache_usage.set(event.num_used_blocks / max(event.num_total_blocks, 1))
                self._host_usage.set(event.num_used_host_blocks / max(event.num_total_host_blocks, 1))

    def refused(self, status: int) -> None:
        """A request was answered with `status`; it counts where the server, not the request, is the reason."""
        if status in (429, 503):
            self._refused.labels(str(status)).inc()

    def observe(self, engine: Watched) -> None:
        """Takes in what no event tells."""
        status = engine.health().status
        for one in _STATUSES:
            self._status.labels(one).set(one == status)
        self._restarts.set(engine.num_restarts)
        self._queued_tokens.set(engine.num_queued_tokens)

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(self.registry)

    def _request(self, event: RequestEvent) -> None:
        since_arrival = event.time - event.arrival_time
        match event.kind:
            case "scheduled":
                self._queue_time.observe(since_arrival)
            case "preempted":
                self._preemptions.inc()
            case "first_token":
                self._first_token.observe(since_arrival)
                self._prompt(event)
            case "aborted":
                self._generation_tokens.inc(event.num_output_tokens)
                self._aborted.labels(event.finish_reason).inc()
            case "finished":
                self._latency.observe(since_arrival)
                self._generation_tokens.inc(event.num_output_tokens)
                self._finished.labels(event.finish_reason).inc()
                if event.first_token_time is None and event.finish_reason != "error":
                    # Only what is pooled ends well without a token.
                    self._prompt(event)
                each = event.num_output_tokens / event.num_sequences
                if event.first_token_time is not None and each > 1:
                    self._per_token.observe((event.time - event.first_token_time) / (each - 1))

    def _prompt(self, event: RequestEvent) -> None:
        self._prompt_tokens.inc(event.num_prompt_tokens)
        self._cached_tokens.inc(event.num_cached_tokens)
        self._hits.inc(event.num_cached_tokens > 0)

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"toolkit_lm_{name}", help, registry=self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"toolkit_lm_{name}", help, registry=self.registry)

    def _seconds(self, name: str, help: str) -> Histogram:
        return Histogram(f"toolkit_lm_{name}", f"Seconds: {help}", buckets=_LATENCY, registry=self.registry)
