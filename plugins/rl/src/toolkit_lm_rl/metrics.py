"""Figures of sleep, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from toolkit_lm_rl.share import PART, State

if TYPE_CHECKING:
    from toolkit_lm_serving.engine import ServingEngine

_STATES = ("awake", "weights_offloaded", "discard_all")


class SleepState(Collector):
    """The state of sleep of the engine: one of vLLM's three is 1, and the others are 0. A sleep of
    level 0 is awake."""

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine
        self._level = 0

    async def ask(self) -> None:
        """Asks the engine."""
        found = await self._engine.call_workers(f"{PART}.state", None, State)
        self._level = max(state.level for state in found)

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "toolkit_lm_engine_sleep_state",
            "State of sleep: awake, weights_offloaded (level 1) or discard_all (level 2).",
            labels=["sleep_state"],
        )
        for level, name in enumerate(_STATES):
            family.add_metric([name], float(level == self._level))
        yield family
