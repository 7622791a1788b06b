"""TierPlanner: tells tiers what requests find, and the front the figures of the tiers. Needs no
torch."""

from __future__ import annotations

import logging
from typing import Any

from msgspec import Raw
from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import BlockHashes, BlockManager, TokenRange
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Planner, Request
from toolkit_lm.step import worker_method

from toolkit_lm_kv_tiers.pricing import PricedTier
from toolkit_lm_kv_tiers.share import Tiers

logger = logging.getLogger(__name__)


class TierPlanner(Planner):
    """Planner of all tiers of an engine: the first of several does the work. A request waits while
    a tier is asking."""

    _has_failed = False

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        pass

    @property
    def tiers(self) -> dict[str, PricedTier]:
        """The tiers in use, by name."""
        tiers = self.engine.scheduler.tiers.tiers
        return {name: tier for name, tier in tiers.items() if isinstance(tier, PricedTier)}

    def may_begin(self, request: Request, tokens: TokenRange) -> str | None:
        asking = [name for name, tier in self.tiers.items() if tier.is_asking()]
        return f"asks {asking[0]}" if asking else None

    def begin(self, plan: StepPlan, request: Request) -> None:
        if request.scheduled_time is not None or not self._leads():
            return
        try:
            self._tell(request)
        except Exception:
            # Figures must end no request.
            if not self._has_failed:
                logger.exception("KV tiers could not be told what a request has found")
            self._has_failed = True

    @worker_method
    def counts(self) -> Tiers:
        """Returns the figures of each tier."""
        return Tiers({name: tier.figures() for name, tier in self.tiers.items()})

    def _leads(self) -> bool:
        planners = self.engine.scheduler.planners.by_name.values()
        return next(each for each in planners if isinstance(each, TierPlanner)) is self

    def _tell(self, request: Request) -> None:
        """Tells each tier what the request has found on the device, and why no more of it is in
        the tier."""
        if not request.reads_prefix_cache or request.encoder is not None:
            return
        blocks: BlockManager = self.engine.scheduler.blocks
        hashes = request.leader.block_hashes
        limit = request.num_known_tokens - 1
        length = blocks.find_prefix(hashes, limit)
        for tier in self.tiers.values():
            if not (request.swapped or request.skips_tiers):
                reason = why_missed(blocks, hashes, limit, length, tier)
                # No request waits for an answer to that.
                tier.is_asking()
                if reason is not None:
                    tier.missed(reason)
            _offer_hits(blocks, hashes, length, tier)


def _offer_hits(blocks: BlockManager, hashes: BlockHashes, length: int, tier: PricedTier) -> None:
    """Tells a tier the blocks of a found prefix of `length` tokens. Those that it wants now are
    offered to it again, at the end of the step."""
    for group in blocks.groups:
        if group.spec.of_encoder or not length:
            continue
        for _, digest in group.wanted(hashes, length):
            tier.hit(group.index, digest)
            key = (group.index, digest)
            block = group.pool.find(key)
            if block is not None and group.pool.on_published and tier.wants(*key):
                group.pool.on_published(key, block)


def why_missed(
    blocks: BlockManager, hashes: BlockHashes, limit: int, length: int, tier: PricedTier
) -> str | None:
    """Reason for which a tier cannot make a found prefix of `length` tokens longer, up to `limit`:
    see `Counts.misses`. None: it is whole, or the tier has more of it."""
    border = blocks.border
    whole = limit // border * border
    if length < whole and tier.is_down:
        return "off"
    if length >= whole or blocks.find_prefix(hashes, limit, tier.find) > length:
        return None
    groups = [group for group in blocks.groups if not group.spec.of_encoder]
    gaps = [(group, group.gap(hashes, whole, tier.find)) for group in groups]
    lacking = [group for group, gap in gaps if gap is not None and gap // border * border <= length]
    if not lacking:
        return "border"
    return "absent" if len(lacking) == len(groups) else lacking[0].spec.kind
