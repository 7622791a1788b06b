"""Figures of KV tiers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit_lm_kv_disk.share import PART, Counts, Tiers

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine


class TierFigures(Collector):
    """Hits and misses of each tier, and what it holds, over all engines."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._tiers: dict[str, list[Counts]] = {}

    async def ask(self) -> None:
        """Asks the engines."""
        found = await self._engine.call_workers(f"{PART}.counts", None, Tiers)
        names = {name for each in found for name in each.tiers}
        self._tiers = {
            name: [each.tiers[name] for each in found if name in each.tiers]
            for name in sorted(names)
        }

    def collect(self) -> Iterator[Metric]:
        loads = CounterMetricFamily(
            "toolkit_lm_kv_tier_loads",
            "Loads of cached prefixes by their end: loaded, failed, late, cancelled, or slower, "
            "which were not begun since computing was faster.",
            labels=["tier", "outcome"],
        )
        counters = {
            "loaded_bytes": "Bytes of KV blocks that were loaded, of each rank.",
            "load_seconds": "Seconds of the loads that have brought blocks, beside the steps.",
            "stored_blocks": "KV blocks that were given to the tier.",
        }
        gauges = {
            "held_blocks": "KV blocks that the tier has.",
            "held_bytes": "Bytes of KV blocks that the tier has, of each rank.",
        }
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            name: CounterMetricFamily(f"toolkit_lm_kv_tier_{name}", text, labels=["tier"])
            for name, text in counters.items()
        } | {
            name: GaugeMetricFamily(f"toolkit_lm_kv_tier_{name}", text, labels=["tier"])
            for name, text in gauges.items()
        }
        for tier, counts in self._tiers.items():
            for outcome in ("loaded", "failed", "late", "cancelled", "slower"):
                number = sum(each.loads.get(outcome, 0) for each in counts)
                loads.add_metric([tier, outcome], number)
            for name, family in families.items():
                family.add_metric([tier], sum(getattr(each, name) for each in counts))
        yield loads
        yield from families.values()
