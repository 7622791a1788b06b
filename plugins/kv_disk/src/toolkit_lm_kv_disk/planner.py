"""CountsPlanner: tells the front the figures of the tiers. Needs no torch."""

from __future__ import annotations

from typing import Any

from msgspec import Raw
from toolkit_lm.config import VllmConfig
from toolkit_lm.scheduler import Planner
from toolkit_lm.step import worker_method

from toolkit_lm_kv_disk.share import Tiers
from toolkit_lm_kv_disk.tier import LruTier


class CountsPlanner(Planner):
    """It takes no part in steps."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        pass

    @worker_method
    def counts(self) -> Tiers:
        """Returns the figures of each tier."""
        tiers = self.engine.scheduler.tiers.tiers
        return Tiers(
            {name: tier.figures() for name, tier in tiers.items() if isinstance(tier, LruTier)}
        )
