"""The figures of Metrics: their names, help texts and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from toolkit_lm.events import WAITS

from toolkit_lm_server.collectors import LATENCY, Intervals
from toolkit_lm_server.metric_names import ENGINE, WAITING_BY_REASON

_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LENGTHS = (*_TOKENS, 32768, 65536, 131072, 262144)
_FEW = (1, 2, 5, 10, 20)

Kind = TypeVar("Kind", Counter, Gauge)


class Figures:
    """Figures of one engine or several, and of the HTTP requests to them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Registers all figures in `registry`, in the order in which they are told."""
        self.registry = registry
        self._add_load()
        self._add_states()
        self._add_counts()
        self._add_ends()
        self._add_times()
        self._add_lengths()
        self._add_steps()
        self._add_http()

    def _add_load(self) -> None:
        """Adds figures of the engine's current load."""
        metric = self._labelled
        self.running = metric(
            Gauge,
            "num_sequences_running",
            "Sequences of the requests that have a place in the batch.",
        )
        self.waiting = metric(
            Gauge, "num_requests_waiting", "Requests that wait for a place in the batch."
        )
        self.waiting_by_reason = Gauge(
            f"toolkit_lm_{WAITING_BY_REASON}",
            "The same requests, by why they waited when they were last asked.",
            [ENGINE, "reason"],
            registry=self.registry,
        )
        for reason in WAITS:
            self.waiting_by_reason.labels("0", reason)
        self.batch_usage = metric(
            Gauge, "batch_usage_ratio", "Used part of the batch's rows, 0 to 1."
        )
        self.cache_usage = metric(
            Gauge, "kv_cache_usage_ratio", "Used part of the KV cache blocks, 0 to 1."
        )
        self.host_usage = metric(
            Gauge,
            "kv_cache_host_usage_ratio",
            "Used part of the host blocks that requests are swapped to, 0 to 1.",
        )
        self.queued_tokens = self._gauge(
            "num_prompt_tokens_waiting", "Prompt tokens of the requests that wait."
        )
        self.estimated_wait = self._gauge(
            "estimated_wait_seconds",
            "Seconds until a new request gets a place in the batch, by the pace of the last ten.",
        )
        self.restarts = Counter(
            "toolkit_lm_engine_restarts",
            "How many times a dead engine process was started anew.",
            registry=self.registry,
        )

        self.media_queries = Counter(
            "toolkit_lm_media_cache_queries",
            "Media items that were looked for among those that the engine holds.",
            registry=self.registry,
        )
        self.media_hits = Counter(
            "toolkit_lm_media_cache_hits",
            "Of these, items that the engine held.",
            registry=self.registry,
        )

    def _add_states(self) -> None:
        """Adds figures of engines' states: whether they serve."""
        self.status = Gauge(
            "toolkit_lm_engine_status",
            "1 for the engine's status, 0 for others.",
            ["status"],
            registry=self.registry,
        )
        self.ready = Gauge(
            "toolkit_lm_engine_ready",
            "Of several engines: 1 for one that serves.",
            ["engine"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "toolkit_lm_engine_tokens_in_flight",
            "Of several engines: tokens of prompts and outputs of the requests that one has.",
            ["engine"],
            registry=self.registry,
        )

    def _add_counts(self) -> None:
        """Adds counters of the engine's work."""
        metric = self._labelled
        self.preemptions = metric(
            Counter,
            "preemptions",
            "Requests that lost their place in the batch for want of blocks.",
        )
        self.prompt_tokens = metric(
            Counter,
            "prompt_tokens",
            "Prompt tokens of the requests that got a first token, or were pooled.",
        )
        self.queries = metric(
            Counter,
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache.",
        )
        self.hits = metric(
            Counter,
            "prefix_cache_hits",
            "Of these, tokens whose keys and values were in the cache.",
        )
        self.generation_tokens = metric(
            Counter, "generation_tokens", "Output tokens, as they come."
        )
        self._add_drafts()
        self.compilations = metric(
            Counter,
            "compilations_after_ready",
            "Graphs that torch compiled while requests waited. It should stay 0.",
        )

    def _add_drafts(self) -> None:
        """Adds counters of speculative decoding."""
        metric = self._labelled
        self.drafts = metric(
            Counter,
            "spec_decode_num_drafts",
            "Speculative decoding: sequences with drafts, over steps.",
        )
        self.draft_tokens = metric(
            Counter, "spec_decode_num_draft_tokens", "Speculative decoding: verified drafts."
        )
        self.accepted_tokens = metric(
            Counter, "spec_decode_num_accepted_tokens", "Speculative decoding: accepted drafts."
        )
        self.draft_tokens_per_pos = Counter(
            "toolkit_lm_spec_decode_num_draft_tokens_per_pos",
            "Verified drafts, by their place among the drafts of a sequence, from 0 on.",
            [ENGINE, "position"],
            registry=self.registry,
        )
        self.accepted_tokens_per_pos = Counter(
            "toolkit_lm_spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts, by their place.",
            [ENGINE, "position"],
            registry=self.registry,
        )
        self.drafter_tokens = Counter(
            "toolkit_lm_drafter_draft_tokens",
            "Verified drafts by drafter. Those that a grammar forces have none.",
            [ENGINE, "drafter"],
            registry=self.registry,
        )
        self.drafter_accepted = Counter(
            "toolkit_lm_drafter_accepted_tokens",
            "Accepted drafts by drafter.",
            [ENGINE, "drafter"],
            registry=self.registry,
        )

    def _add_ends(self) -> None:
        """Adds counters of requests, by how they end."""
        self.finished = Counter(
            "toolkit_lm_requests_finished",
            "Ended requests of the engine, by reason: each input of an HTTP request is one.",
            ["reason"],
            registry=self.registry,
        )
        self.aborted = Counter(
            "toolkit_lm_requests_aborted",
            "Requests ended from outside, by reason.",
            ["reason"],
            registry=self.registry,
        )
        self.refused = Counter(
            "toolkit_lm_requests_refused",
            "Requests not taken, by HTTP status.",
            ["status"],
            registry=self.registry,
        )

    def _add_times(self) -> None:
        """Adds histograms of requests' times."""
        self.queue_time = self._seconds(
            "request_queue_time_seconds", "From arrival to a place in the batch."
        )
        self.first_token = self._seconds(
            "time_to_first_token_seconds", "From arrival to the first output token."
        )
        self.between = Intervals(
            "toolkit_lm_inter_token_latency_seconds",
            "Seconds: From one token of a sequence to the next.",
            self.registry,
        )
        self.per_token = self._seconds(
            "time_per_output_token_seconds",
            "Mean time of a request's output tokens after the first.",
        )
        self.prefill = self._seconds(
            "request_prefill_time_seconds", "From a place in the batch to the first output token."
        )
        self.decode = self._seconds(
            "request_decode_time_seconds", "From the first output token to the end."
        )
        self.inference = self._seconds(
            "request_inference_time_seconds", "From a place in the batch to the end."
        )
        self.latency = self._seconds("e2e_request_latency_seconds", "From arrival to the end.")

    def _add_lengths(self) -> None:
        """Adds histograms of requests' sizes."""
        self.prompt_length = self._lengths(
            "request_prompt_tokens", "Prompt tokens of an ended request."
        )
        self.output_length = self._lengths(
            "request_generation_tokens", "Output tokens of an ended request, over its sequences."
        )
        self.sequences = self._numbers(
            "request_sequences", "Sequences of an ended request, its n.", _FEW
        )
        self.max_tokens = self._lengths(
            "request_max_tokens", "Output tokens that a request allows, where it says how many."
        )
        self.request_preemptions = self._numbers(
            "request_preemptions", "How often an ended request was preempted.", (0, *_FEW)
        )

    def _add_steps(self) -> None:
        """Adds figures of the KV cache and of steps."""
        self.kv_cache = Gauge(
            "toolkit_lm_kv_cache_info",
            "1. The labels tell the size of the KV cache: tokens, and requests of the longest "
            "context, that have room at a time.",
            ["block_size", "num_blocks", "size_tokens", "max_concurrency"],
            registry=self.registry,
        )
        self.step_time = self._seconds("step_duration_seconds", "Of one step of the engine.")
        self.step_tokens = Histogram(
            "toolkit_lm_step_tokens",
            "Tokens computed in one step of the engine.",
            buckets=_TOKENS,
            registry=self.registry,
        )

    def _add_http(self) -> None:
        """Adds figures of HTTP requests."""
        self.http_requests = Counter(
            "http_requests",
            "HTTP requests, by route, method and class of status.",
            ["handler", "method", "status"],
            registry=self.registry,
        )
        self.http_time = Histogram(
            "http_request_duration_seconds",
            "Seconds: From a request's headers to its answer's end.",
            ["handler", "method"],
            buckets=LATENCY,
            registry=self.registry,
        )

    def _gauge(self, name: str, help: str) -> Gauge:
        return Gauge(f"toolkit_lm_{name}", help, registry=self.registry)

    def _labelled(self, kind: type[Kind], name: str, help: str) -> Kind:
        """A figure with a label that says which engine. The first engine's is told from the
        start."""
        made = kind(f"toolkit_lm_{name}", help, [ENGINE], registry=self.registry)
        made.labels("0")
        return made

    def _seconds(self, name: str, help: str) -> Histogram:
        return Histogram(
            f"toolkit_lm_{name}", f"Seconds: {help}", buckets=LATENCY, registry=self.registry
        )

    def _lengths(self, name: str, help: str) -> Histogram:
        return self._numbers(name, help, _LENGTHS)

    def _numbers(self, name: str, help: str, buckets: Sequence[int]) -> Histogram:
        return Histogram(f"toolkit_lm_{name}", help, buckets=buckets, registry=self.registry)
