"""Figures of an engine under vLLM's names: `LLM.get_metrics`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit_lm.errors import ToolkitError
from toolkit_lm.plugin import Plugins

_PER_POSITION = "_per_pos"


@dataclass
class Metric:
    """A figure, with its labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counts by position."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass
class Histogram(Metric):
    """Numbers of observations by upper bound, "+Inf" the last."""

    count: int
    sum: float
    buckets: dict[str, int]


def counting(engine_args: Any) -> Sequence[object]:
    """The plugins that count an engine's events; none if its options do not ask for figures."""
    return figures() if getattr(engine_args, "disable_log_stats", None) is False else ()


def figures() -> Sequence[object]:
    """A plugin that counts an engine's events."""
    from toolkit_lm_server.metrics import Metrics

    return (Metrics(),)


def snapshot(plugins: Plugins, model_name: str) -> list[Metric]:
    """Figures of the engine of these plugins, under vLLM's names. Raises ToolkitError if nothing
    counts. `model_name`: a label of them."""
    from toolkit_lm_server.metric_names import named
    from toolkit_lm_server.metrics import Metrics

    listeners = [impl.plugin for impl in plugins.hook.toolkit_event.get_hookimpls()]
    found = [listener for listener in listeners if isinstance(listener, Metrics)]
    if not found:
        raise ToolkitError("nothing was counted: make the engine with disable_log_stats=False.")
    collected = named(found[0].registry, model_name).collect()
    return [made for family in collected for made in _metrics(family)]


def _metrics(family: Any) -> Iterable[Metric]:
    """The figures of a family of Prometheus'."""
    if not family.name.startswith("vllm:"):
        return []
    if family.type == "histogram":
        return _histograms(family)
    if family.name.endswith(_PER_POSITION):
        return _vectors(family)
    if family.type == "counter":
        return [Counter(family.name, s.labels, int(s.value)) for s in family.samples]
    return [Gauge(family.name, s.labels, s.value) for s in family.samples]


def _by_labels(family: Any, without: str) -> dict[tuple[tuple[str, str], ...], list[Any]]:
    """Samples by their labels, of which one is left out."""
    found = defaultdict(list)
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != without}
        found[tuple(labels.items())].append(sample)
    return found


def _vectors(family: Any) -> Iterable[Metric]:
    for labels, samples in _by_labels(family, "position").items():
        counts = {int(s.labels["position"]): int(s.value) for s in samples}
        values = [counts.get(place, 0) for place in range(max(counts) + 1)]
        yield Vector(family.name, dict(labels), values)


def _histograms(family: Any) -> Iterable[Metric]:
    for labels, samples in _by_labels(family, "le").items():
        of = {
            kind: [s for s in samples if s.name.endswith(kind)]
            for kind in ("_bucket", "_count", "_sum")
        }
        buckets = {s.labels["le"]: int(s.value) for s in of["_bucket"]}
        total = int(of["_count"][0].value) if of["_count"] else max(buckets.values(), default=0)
        summed = float(of["_sum"][0].value) if of["_sum"] else 0.0
        yield Histogram(family.name, dict(labels), total, summed, buckets)
