"""The names of metrics: our own, and beside them vLLM's where it has any, for its dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_PREFIX = "toolkit_lm_"
ENGINE = "engine"
"""The label with the number of an engine."""


class VllmName(NamedTuple):
    """vLLM's name of a metric."""

    name: str
    labels: Mapping[str, str] = {}
    """vLLM's labels by ours."""


VLLM_NAMES = {
    "num_sequences_running": VllmName("num_requests_running"),
    "num_requests_waiting": VllmName("num_requests_waiting"),
    "num_requests_waiting_by_reason": VllmName("num_requests_waiting_by_reason"),
    "kv_cache_usage_ratio": VllmName("kv_cache_usage_perc"),
    "prefix_cache_queries": VllmName("prefix_cache_queries"),
    "prefix_cache_hits": VllmName("prefix_cache_hits"),
    "media_cache_queries": VllmName("mm_cache_queries"),
    "media_cache_hits": VllmName("mm_cache_hits"),
    "preemptions": VllmName("num_preemptions"),
    "prompt_tokens": VllmName("prompt_tokens"),
    "generation_tokens": VllmName("generation_tokens"),
    "spec_decode_num_drafts": VllmName("spec_decode_num_drafts"),
    "spec_decode_num_draft_tokens": VllmName("spec_decode_num_draft_tokens"),
    "spec_decode_num_accepted_tokens": VllmName("spec_decode_num_accepted_tokens"),
    "spec_decode_num_draft_tokens_per_pos": VllmName("spec_decode_num_draft_tokens_per_pos"),
    "spec_decode_num_accepted_tokens_per_pos": VllmName("spec_decode_num_accepted_tokens_per_pos"),
    "requests_finished": VllmName("request_success", {"reason": "finished_reason"}),
    "request_prompt_tokens": VllmName("request_prompt_tokens"),
    "request_generation_tokens": VllmName("request_generation_tokens"),
    "step_tokens": VllmName("iteration_tokens_total"),
    "time_to_first_token_seconds": VllmName("time_to_first_token_seconds"),
    "inter_token_latency_seconds": VllmName("inter_token_latency_seconds"),
    "time_per_output_token_seconds": VllmName("request_time_per_output_token_seconds"),
    "e2e_request_latency_seconds": VllmName("e2e_request_latency_seconds"),
    "request_queue_time_seconds": VllmName("request_queue_time_seconds"),
    "request_prefill_time_seconds": VllmName("request_prefill_time_seconds"),
    "request_decode_time_seconds": VllmName("request_decode_time_seconds"),
    "request_inference_time_seconds": VllmName("request_inference_time_seconds"),
    "request_sequences": VllmName("request_params_n"),
    "request_max_tokens": VllmName("request_params_max_tokens"),
    "request_preemptions": VllmName("request_num_preemptions"),
    "lora_requests_info": VllmName("lora_requests_info"),
    "engine_sleep_state": VllmName("engine_sleep_state"),
    "kv_cache_info": VllmName(
        "cache_config_info",
        {
            "num_blocks": "num_gpu_blocks",
            "size_tokens": "kv_cache_size_tokens",
            "max_concurrency": "kv_cache_max_concurrency",
        },
    ),
}
"""vLLM's names by ours, without their prefixes."""
WAITING_BY_REASON = "num_requests_waiting_by_reason"
_DEFERRED = ("part", "loading", "drawing", "policy")
"""Our reasons that vLLM calls "deferred": requests wait for something else than room in the batch.
It calls the others "capacity"."""


class _Named(Collector):
    """A registry's metrics, those that vLLM has under its names, too. The engine's metrics get
    labels that say which engine."""

    def __init__(self, registry: CollectorRegistry, model_name: str, several: bool) -> None:
        self._several = several
        self._registry = registry
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            short = family.name.removeprefix(_PREFIX)
            if short == family.name or short.startswith("engine_process_"):
                yield self._unlabelled(_renamed(family, family.name, {}, {}))
                continue
            if (other := VLLM_NAMES.get(short)) is not None:
                labels = {ENGINE: "0", "model_name": self._model_name}
                renamed = _renamed(family, f"vllm:{other.name}", labels, other.labels)
                yield _merged_reasons(renamed) if short == WAITING_BY_REASON else renamed
            yield self._unlabelled(
                _renamed(family, family.name, {"model_name": self._model_name}, {})
            )

    def _unlabelled(self, family: Metric) -> Metric:
        """The metric without the engine's label, where there is one engine."""
        if not self._several:
            for sample in family.samples:
                sample.labels.pop(ENGINE, None)
        return family


def named(registry: CollectorRegistry, model_name: str, *, several: bool = False) -> Collector:
    """A registry's metrics, under the names to tell. `several`: figures say which engine they are
    of."""
    return _Named(registry, model_name, several)


def _merged_reasons(family: Metric) -> Metric:
    """The requests that wait, summed up by vLLM's reasons."""
    summed: dict[tuple[str, ...], Sample] = {}
    for sample in family.samples:
        reason = "deferred" if sample.labels["reason"] in _DEFERRED else "capacity"
        labels = sample.labels | {"reason": reason}
        key = tuple(labels.values())
        value = sample.value + (summed[key].value if key in summed else 0)
        summed[key] = sample._replace(labels=labels, value=value)
    family.samples = list(summed.values())
    return family


def _renamed(
    family: Metric, name: str, labels: dict[str, str], others: Mapping[str, str]
) -> Metric:
    made = Metric(name, family.documentation, family.type)
    made.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(family.name),
            labels=labels
            | {others.get(label, label): value for label, value in sample.labels.items()},
        )
        for sample in family.samples
        # When each series began is told by process_start_time_seconds well enough.
        if not sample.name.endswith("_created")
    ]
    return made
