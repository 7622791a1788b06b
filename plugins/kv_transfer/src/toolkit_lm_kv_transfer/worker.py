"""TransferPart: tells the figures of a rank's store."""

from __future__ import annotations

from toolkit_lm.step import StepPart, worker_method

from toolkit_lm_kv_transfer.share import RankCounts
from toolkit_lm_kv_transfer.store import store_of


class TransferPart(StepPart):
    """It takes no part in steps."""

    @worker_method
    def rank_counts(self) -> RankCounts:
        """Returns the figures of this rank."""
        store = store_of(self.options, self.config.parallel.rank)
        return RankCounts() if store is None else store.counts()
