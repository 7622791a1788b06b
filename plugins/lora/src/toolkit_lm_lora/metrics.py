"""Figures of adapters, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from toolkit_lm_server.caller import CALLER

from toolkit_lm_lora.front import LoraRequests, Registered
from toolkit_lm_lora.share import Counts

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine


class LoraFigures(Collector):
    """Adapters in memory, and which ones requests have. A key that is limited to some adapters is
    told no other names, not how many there are, and no counts of all of them."""

    def __init__(self, engine: ServingEngine, requests: LoraRequests) -> None:
        self._engine = engine
        self._requests = requests
        self._counts: list[Counts] = []

    async def ask(self) -> None:
        """Asks the workers."""
        found = await self._engine.call_workers("lora.counts", None, Counts)
        self._counts = [counts for counts in found if counts.counts]

    def collect(self) -> Iterator[Metric]:
        may_use = CALLER.get().may_use
        waiting, running = self._requests.usage.names()
        info = GaugeMetricFamily(
            "toolkit_lm_lora_requests_info",
            "Adapters of requests that run and that wait. The value is the time, in seconds.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        names = [",".join(sorted(filter(may_use, those))) for those in (running, waiting)]
        info.add_metric([str(self._requests.options.max_adapters), *names], time.time())
        yield info
        counts = self._counts
        mine = [known for name, known in self._requests.adapters.items() if may_use(name)]
        yield GaugeMetricFamily("toolkit_lm_lora_registered", "Names of adapters.", len(mine))
        resident = [size for each in counts for size in self._sizes(each, mine)]
        yield GaugeMetricFamily(
            "toolkit_lm_lora_resident", "Adapters in the memory of workers.", len(resident)
        )
        yield GaugeMetricFamily(
            "toolkit_lm_lora_resident_bytes",
            "Bytes of these, of one worker per engine.",
            sum(resident),
        )
        if CALLER.get().adapters is not None:
            # They are of all adapters together.
            return
        yield CounterMetricFamily(
            "toolkit_lm_lora_hits",
            "Sequences that joined the batch while their adapter was in memory.",
            sum(each.hits for each in counts),
        )
        yield CounterMetricFamily(
            "toolkit_lm_lora_loads", "Adapters that were read.", sum(each.loads for each in counts)
        )
        yield CounterMetricFamily(
            "toolkit_lm_lora_evictions",
            "Adapters that were dropped from memory.",
            sum(each.evictions for each in counts),
        )
        yield CounterMetricFamily(
            "toolkit_lm_lora_load_seconds",
            "Seconds in which adapters were read, beside the steps.",
            sum(each.load_seconds for each in counts),
        )

    @staticmethod
    def _sizes(counts: Counts, mine: Iterable[Registered]) -> list[int]:
        """Bytes of the adapters in memory: of a limited key, only of its own."""
        if CALLER.get().adapters is None:
            return [*counts.resident.values()]
        digests = {known.known_digest for known in mine}
        return [size for digest, size in counts.resident.items() if digest in digests]
