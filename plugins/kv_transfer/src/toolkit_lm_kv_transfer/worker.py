"""TransferPart: hands a rank's store the planner's news, and tells its figures."""

from __future__ import annotations

from msgspec import Raw, msgpack
from toolkit_lm.messages import StepPlan
from toolkit_lm.step import StepPart, StepRun, worker_method

from toolkit_lm_kv_transfer.share import PART, News, RankCounts
from toolkit_lm_kv_transfer.store import store_of


class TransferPart(StepPart):
    """It computes nothing."""

    def begin(self, plan: StepPlan, step: StepRun) -> Raw | None:
        data = plan.parts.get(PART)
        store = store_of(self.options, self.config.parallel.rank)
        if data is not None and store is not None:
            store.hear(msgpack.decode(data, type=News))
        return None

    @worker_method
    def rank_counts(self) -> RankCounts:
        """Returns the figures of this rank."""
        store = store_of(self.options, self.config.parallel.rank)
        return RankCounts() if store is None else store.counts()
