"""TierPart: tells the front what the stores of a rank have lost."""

from __future__ import annotations

from toolkit_lm.step import StepPart, worker_method

from toolkit_lm_kv_tiers.share import Lost
from toolkit_lm_kv_tiers.stores import num_lost


class TierPart(StepPart):
    """It takes no part in steps."""

    @worker_method
    def lost(self) -> Lost:
        """Returns the blocks that this rank's stores could not keep."""
        return Lost(num_lost(self.options))
