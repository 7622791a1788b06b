"""Figures of KV tiers, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit_lm_kv_tiers.share import Counts, Lost, Tiers

_COUNTERS = {
    "loaded_bytes": "Bytes of KV blocks that were loaded, of each rank.",
    "load_seconds": "Seconds of the loads that have brought blocks, beside the steps.",
    "stored_blocks": "KV blocks that were given to the tier.",
    "withheld_blocks": "KV blocks that were not given to the tier: seen once, with selective "
    "writing.",
}
_GAUGES = {
    "held_blocks": "KV blocks that the tier is known to have.",
    "held_bytes": "Bytes of KV blocks that the tier is known to have, of each rank.",
}


class TierFigures(Collector):
    """Hits and misses of each tier, and what it holds, over all engines."""

    def __init__(self, engine: Any) -> None:
        """`engine`: what has `call_workers`."""
        self.parts: list[str] = []
        """Parts of the plugins that bring tiers."""
        self._engine = engine
        self._tiers: dict[str, list[Counts]] = {}
        self._lost: dict[str, int] = {}

    async def ask(self) -> None:
        """Asks the engines."""
        # The planner of any part knows all tiers.
        found = await self._engine.call_workers(f"{self.parts[0]}.counts", None, Tiers)
        names = {name for each in found for name in each.tiers}
        self._tiers = {
            name: [each.tiers[name] for each in found if name in each.tiers]
            for name in sorted(names)
        }
        lost: dict[str, int] = {}
        for part in self.parts:
            for each in await self._engine.call_workers(f"{part}.lost", None, Lost):
                for tier, number in each.tiers.items():
                    lost[tier] = lost.get(tier, 0) + number
        self._lost = lost

    def collect(self) -> Iterator[Metric]:
        loads = CounterMetricFamily(
            "toolkit_lm_kv_tier_loads",
            "Loads of cached prefixes by their end: loaded, failed, late, cancelled, or slower, "
            "which were not begun since computing was faster.",
            labels=["tier", "outcome"],
        )
        misses = CounterMetricFamily(
            "toolkit_lm_kv_tier_misses",
            "Requests whose prefix the tier could not make longer, by reason: absent, off, border, "
            "or the kind of the KV group that lacks blocks.",
            labels=["tier", "reason"],
        )
        lost = CounterMetricFamily(
            "toolkit_lm_kv_tier_lost_blocks",
            "KV blocks that were given to the tier and could not be kept, over all ranks.",
            labels=["tier"],
        )
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            name: CounterMetricFamily(f"toolkit_lm_kv_tier_{name}", text, labels=["tier"])
            for name, text in _COUNTERS.items()
        } | {
            name: GaugeMetricFamily(f"toolkit_lm_kv_tier_{name}", text, labels=["tier"])
            for name, text in _GAUGES.items()
        }
        for tier, counts in self._tiers.items():
            for outcome in ("loaded", "failed", "late", "cancelled", "slower"):
                number = sum(each.loads.get(outcome, 0) for each in counts)
                loads.add_metric([tier, outcome], number)
            for reason in sorted(
                {"absent", *(reason for each in counts for reason in each.misses)}
            ):
                number = sum(each.misses.get(reason, 0) for each in counts)
                misses.add_metric([tier, reason], number)
            for name, family in families.items():
                family.add_metric([tier], sum(getattr(each, name) for each in counts))
        for tier, number in sorted(self._lost.items()):
            lost.add_metric([tier], number)
        yield loads
        yield misses
        yield lost
        yield from families.values()


def show(api: Any, engine: Any, part: str) -> None:
    """Adds the figures of a plugin's tiers to those of a server. `part`: the plugin's part, with a
    TierPlanner and a TierPart. `api`: the server's, as route plugins get it."""
    shown = [getattr(source, "__self__", None) for source in api.metrics.sources]
    figures = next((each for each in shown if isinstance(each, TierFigures)), None)
    if figures is None:
        figures = TierFigures(engine)
        api.metrics.registry.register(figures)
        api.metrics.sources.append(figures.ask)
    figures.parts.append(part)
