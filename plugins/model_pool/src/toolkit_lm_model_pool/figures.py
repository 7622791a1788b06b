"""Figures of a pool, and of the models that are loaded, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fastapi import Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from toolkit_lm_server.metric_names import named

if TYPE_CHECKING:
    from toolkit_lm_server.metrics import Metrics

    from toolkit_lm_model_pool.pool import Pool

_STATES = ("cold", "loading", "ready", "asleep", "unloading", "failed")
_OF_HTTP = ("http_", "process_", "toolkit_lm_requests_refused")
"""Beginnings of the figures that the server itself has. The others are of engines."""
_COUNTERS = {
    "loads": ("num_loads", "How often the model was loaded."),
    "evictions": ("num_evictions", "How often the model made room for another."),
    "sleeps": ("num_sleeps", "How often the model fell asleep."),
    "failures": ("num_failures", "How often a start has failed, or the engine has died."),
    "wait_seconds": ("wait_seconds", "Seconds that requests have waited for the model."),
}
_GAUGES = {
    "bytes_needed": ("charge", "Bytes of the budget that the model takes, or would take."),
    "bytes_resident": ("resident", "Bytes that its processes took at the last look."),
    "load_seconds": ("load_seconds", "Seconds that the last load took."),
    "wake_seconds": ("wake_seconds", "Seconds that the last waking up took."),
    "requests_in_flight": ("in_flight", "HTTP requests that the model answers."),
}


class PoolFigures(Collector):
    """Figures of the models of a pool, by model."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        models = list(self._pool.models.values())
        budget = GaugeMetricFamily("toolkit_lm_pool_budget_bytes", "Bytes of all loaded models.")
        budget.add_metric([], self._pool.budget)
        yield budget
        state = GaugeMetricFamily(
            "toolkit_lm_pool_model_state",
            "1 for the state of the model.",
            labels=["model_name", "state"],
        )
        waiting = GaugeMetricFamily(
            "toolkit_lm_pool_requests_waiting",
            "HTTP requests that wait until the model is loaded.",
            labels=["model_name"],
        )
        for model in models:
            waiting.add_metric([model.name], len(model.waiters))
            for name in _STATES:
                state.add_metric([model.name, name], model.state == name)
        yield state
        yield waiting
        for kind, table in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, (field, text) in table.items():
                family = kind(f"toolkit_lm_pool_{name}", text, labels=["model_name"])
                for model in models:
                    family.add_metric([model.name], getattr(model, field))
                yield family


class _Together(Collector):
    """The figures of several registries: each name once, with the samples of all."""

    def __init__(self, parts: list[Collector]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for part in self._parts:
            for family in part.collect():
                families.setdefault(family.name, family)
                if families[family.name] is not family:
                    families[family.name].samples += family.samples
        yield from families.values()


class _Kept(Collector):
    """Figures of a registry that begin with `_OF_HTTP`, or the others."""

    def __init__(self, source: Collector, *, of_http: bool) -> None:
        self._source = source
        self._of_http = of_http

    def collect(self) -> Iterator[Metric]:
        return (
            family
            for family in self._source.collect()
            if family.name.startswith(_OF_HTTP) is self._of_http
        )


class PoolMetrics:
    """The handler of /metrics."""

    def __init__(self, pool: Pool, server: Metrics) -> None:
        """`server`: the figures of HTTP requests."""
        self._pool = pool
        self._server = server

    async def metrics(self) -> Response:
        """Figures for Prometheus: of the server, of the pool, and of each loaded model."""
        parts: list[Collector] = [
            _Kept(self._server.registry, of_http=True),
            PoolFigures(self._pool),
        ]
        for model in list(self._pool.models.values()):
            metrics = model.metrics
            engine = model.engine
            if metrics is None or engine is None:
                continue
            await metrics.ask()
            metrics.observe(engine)
            several = len(getattr(engine, "engines", ())) > 1
            own = named(metrics.registry, model.name, several=several)
            parts.append(_ByModel(_Kept(own, of_http=False), model.name))
        return PlainTextResponse(generate_latest(_Together(parts)), media_type=CONTENT_TYPE_LATEST)


class _ByModel(Collector):
    """Figures of one model, each with the model's name."""

    def __init__(self, source: Collector, name: str) -> None:
        self._source = source
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "model_name": self._name})
                for sample in family.samples
            ]
            yield family
