"""Figures of transfers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit_lm_kv_transfer.share import PART, Counts, RankCounts, added

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_PREFIX = "toolkit_lm_kv_transfer"
_LOADS = ("loaded", "failed", "late", "cancelled", "foreign")
_FAILURES = ("unreachable", "missing", "late", "damaged", "foreign")
_COUNTERS = {
    "fetched_blocks": "KV blocks that were fetched of peers.",
    "fetched_bytes": "Bytes of KV blocks that were fetched of peers.",
    "shared_blocks": "KV blocks that were read from memory which the peer shares.",
    "sent_blocks": "KV blocks that peers have fetched.",
    "sent_bytes": "Bytes of KV blocks that peers have fetched.",
    "expired_blocks": "KV blocks that no peer has fetched in time, or that had to make room.",
}
_GAUGES = {
    "held_blocks": "KV blocks that wait for peers.",
    "held_bytes": "Bytes of KV blocks that wait for peers.",
}


class TransferFigures(Collector):
    """Blocks offered, sent, fetched and missed, over all engines and ranks."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._counts: list[Counts] = []
        self._ranks: list[RankCounts] = []

    async def ask(self) -> None:
        """Asks the engines."""
        self._counts = await self._engine.call_workers(f"{PART}.counts", None, Counts)
        self._ranks = await self._engine.call_workers(f"{PART}.rank_counts", None, RankCounts)

    def collect(self) -> Iterator[Metric]:
        loads = CounterMetricFamily(
            f"{_PREFIX}_loads",
            "Requests that came with KV blocks of a peer, by the end of the load: loaded, failed, "
            "late, cancelled, or foreign, where the peer is not on the list. All but loaded "
            "compute their prompt.",
            labels=["outcome"],
        )
        found = added(counts.loads for counts in self._counts)
        for outcome in _LOADS:
            loads.add_metric([outcome], found.get(outcome, 0))
        yield loads
        failures = CounterMetricFamily(
            f"{_PREFIX}_failures",
            "KV blocks that did not come, by reason.",
            labels=["reason"],
        )
        found = added(counts.failures for counts in self._ranks)
        for reason in _FAILURES:
            failures.add_metric([reason], found.get(reason, 0))
        yield failures
        seconds = sum(counts.load_seconds for counts in self._counts)
        yield CounterMetricFamily(
            f"{_PREFIX}_seconds", "Seconds of the loads that have brought blocks.", value=seconds
        )
        yield CounterMetricFamily(
            f"{_PREFIX}_offers",
            "Requests whose KV blocks were offered to peers.",
            value=sum(counts.offered_requests for counts in self._counts),
        )
        for kind, texts in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text in texts.items():
                total = sum(getattr(counts, name) for counts in self._ranks)
                yield kind(f"{_PREFIX}_{name}", text, value=total)
        reachable = min((counts.reachable_peers for counts in self._ranks), default=0)
        yield GaugeMetricFamily(
            f"{_PREFIX}_reachable_peers", "Peers that answer every rank.", value=reachable
        )
