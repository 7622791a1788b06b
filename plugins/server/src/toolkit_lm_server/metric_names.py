"""The names of metrics: our own, or vLLM's for those that it has, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from toolkit_lm_server.options import MetricNames

_PREFIX = "toolkit_lm_"
ENGINE = "engine"
"""The label of figures of one engine: its number."""


class VllmName(NamedTuple):
    """What vLLM calls a metric."""

    name: str
    labels: Mapping[str, str] = {}
    """By our label, its own."""


VLLM_NAMES = {
    "num_sequences_running": VllmName("num_requests_running"),
    "num_requests_waiting": VllmName("num_requests_waiting"),
    "num_requests_waiting_by_reason": VllmName("num_requests_waiting_by_reason"),
    "kv_cache_usage_ratio": VllmName("kv_cache_usage_perc"),
    "prefix_cache_queries": VllmName("prefix_cache_queries"),
    "prefix_cache_hits": VllmName("prefix_cache_hits"),
    "preemptions": VllmName("num_preemptions"),
    "prompt_tokens": VllmName("prompt_tokens"),
    "generation_tokens": VllmName("generation_tokens"),
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
    "kv_cache_info": VllmName(
        "cache_config_info",
        {
            "num_blocks": "num_gpu_blocks",
            "size_tokens": "kv_cache_size_tokens",
            "max_concurrency": "kv_cache_max_concurrency",
        },
    ),
}
"""By our name, without its prefix."""
WAITING_BY_REASON = "num_requests_waiting_by_reason"
_DEFERRED = ("part", "loading", "drawing", "policy")
"""Our reasons that vLLM has one word for: something else than room in the batch is awaited. The
others are its "capacity"."""


class _Named(Collector):
    """A registry's metrics under other names, those of the engine with labels that say which it
    is."""

    def __init__(
        self, registry: CollectorRegistry, names: MetricNames, model_name: str, several: bool
    ) -> None:
        self._several = several
        self._registry = registry
        self._names = names
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            short = family.name.removeprefix(_PREFIX)
            if short == family.name or short.startswith("engine_process_"):
                yield self._of_one(_renamed(family, family.name, {}, {}))
            elif self._names == "vllm" and (other := VLLM_NAMES.get(short)) is not None:
                labels = {ENGINE: "0", "model_name": self._model_name}
                renamed = _renamed(family, f"vllm:{other.name}", labels, other.labels)
                yield _of_few_reasons(renamed) if short == WAITING_BY_REASON else renamed
            else:
                yield self._of_one(
                    _renamed(family, family.name, {"model_name": self._model_name}, {})
                )

    def _of_one(self, family: Metric) -> Metric:
        """Without the label of the engine, where there is but one."""
        if not self._several:
            for sample in family.samples:
                sample.labels.pop(ENGINE, None)
        return family


def named(
    registry: CollectorRegistry, names: MetricNames, model_name: str, *, several: bool = False
) -> Collector:
    """What there is in a registry, as it is told. `several`: engines, so that figures say of which
    they are."""
    return _Named(registry, names, model_name, several)


def _of_few_reasons(family: Metric) -> Metric:
    """Those who wait, by vLLM's reasons."""
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
