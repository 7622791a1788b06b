"""Collectors of figures that prometheus_client has no class for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit_lm_server.metric_names import ENGINE

LATENCY = (
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
"""Upper bounds of a histogram's buckets, in seconds."""


class EngineProcesses(Collector):
    """The system's figures of engine processes: memory, CPU time, open files."""

    def __init__(self, pids: Callable[[], Sequence[int | None]]) -> None:
        """`pids`: process ids by engine. None stands for an engine without a process."""
        self._pids = pids

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, pid in enumerate(self._pids()):
            # It reads what it is given at once; 0 is no process.
            for family in ProcessCollector(
                "toolkit_lm_engine", pid=partial(int, pid or 0), registry=None
            ).collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={**sample.labels, ENGINE: str(number)})
                    for sample in family.samples
                ]
        yield from families.values()


class Intervals(Collector):
    """A histogram of seconds that takes many equal values at once."""

    def __init__(self, name: str, help: str, registry: CollectorRegistry) -> None:
        self._name = name
        self._help = help
        self._counts = [0] * (len(LATENCY) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, seconds: float, count: int) -> None:
        """Counts the value `count` times."""
        self._counts[bisect_left(LATENCY, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        bounds = [*(str(float(bound)) for bound in LATENCY), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(self._counts)), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)
