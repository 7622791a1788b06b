"""The router's figures, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit_lm_router.fleet import Backend, Fleet

_COUNTERS: dict[str, tuple[str, Callable[[Backend], float]]] = {
    "requests": ("Requests that were sent to the backend.", lambda b: b.num_requests),
    "retries": (
        "Requests that failed at the backend before their answer, and left it.",
        lambda b: b.num_retries,
    ),
    "migrations": (
        "Streams that broke off at the backend, and went on elsewhere.",
        lambda b: b.num_migrations,
    ),
    "prefix_chunks": ("Chunks of the prompts that were sent.", lambda b: b.num_chunks),
    "prefix_hits": (
        "Chunks of these that the backend had had before.",
        lambda b: b.num_hits,
    ),
    "event_gaps": ("Times that KV events of the backend were missed.", lambda b: b.num_event_gaps),
    "queue_seconds": (
        "Seconds that the backend's requests have waited in the router.",
        lambda b: b.queue_seconds,
    ),
}
_GAUGES: dict[str, tuple[str, Callable[[Backend], float]]] = {
    "inflight": ("Requests that the backend has now.", lambda b: b.load),
    "ready": ("1: the backend gets requests.", lambda b: b.is_ready),
}


class RouterMetrics(Collector):
    """Figures of the backends, of the queue and of the answers."""

    def __init__(self, fleet: Fleet, num_waiting: Callable[[], int], name: str = "") -> None:
        """`name`: the router's among several, which is a label of all its figures. Empty: there is
        none."""
        self._fleet = fleet
        self._num_waiting = num_waiting
        self._labels = {"router": name} if name else {}
        self._answers: dict[int, int] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """Counts an answer."""
        self._answers[status] = self._answers.get(status, 0) + 1

    def text(self) -> bytes:
        """All figures, in Prometheus' text format."""
        made: bytes = generate_latest(self._registry)
        return made

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in metric.samples
            ]
            yield metric

    def _collect(self) -> Iterator[Metric]:
        backends = [*self._fleet.backends.values()]
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"toolkit_lm_router_{name}", text, labels=["backend"])
            for backend in backends:
                counter.add_metric([backend.url], value(backend))
            yield counter
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"toolkit_lm_router_{name}", text, labels=["backend"])
            for backend in backends:
                gauge.add_metric([backend.url], value(backend))
            yield gauge
        text = "Requests that wait in the router."
        yield GaugeMetricFamily("toolkit_lm_router_waiting", text, value=self._num_waiting())
        text = "Chunks in the index of prefixes, of all backends."
        yield GaugeMetricFamily(
            "toolkit_lm_router_index_chunks", text, value=len(self._fleet.policy.index)
        )
        answers = CounterMetricFamily(
            "toolkit_lm_router_answers", "Answers of the router, by status.", labels=["status"]
        )
        for status, count in sorted(self._answers.items()):
            answers.add_metric([str(status)], count)
        yield answers
