"""Tiers: what an engine's KV tiers have, bring and are given, as the scheduler sees it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from itertools import count
from typing import NamedTuple

from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import BlockHashes, GroupBlocks
from toolkit_lm.kv.tier import KVTier
from toolkit_lm.messages import StepPlan, TierBlock, TierLoad, TierWork

logger = logging.getLogger(__name__)


class _Load(NamedTuple):
    request_id: str
    num_tokens: int
    """Of its leader, when all blocks are filled."""
    tier: str
    blocks: list[TierBlock]
    deadline: float


class Tiers:
    """Begins loads and hears of their end, and offers to the tiers what the device gives up.

    All of it travels with plans (`StepPlan.tiers`), so that workers do it in the order of the
    steps. A load that is given up is cancelled by the next plan: nothing is written to its blocks
    from then on, and they are free at once.
    """

    def __init__(self, tiers: Mapping[str, KVTier], blocks: BlockManager) -> None:
        self.tiers = tiers
        self._blocks = blocks
        self._loads: dict[int, _Load] = {}
        """By ticket, those that have not ended."""
        self._tickets = count(1)
        self._work = TierWork()
        self._evicted: list[tuple[int, bytes, int]] = []
        """(group, digest, block), since the last plan."""
        self._waits = False
        """A plan that waits for a load is on its way."""
        for pool in blocks.pools if tiers else ():
            pool.on_evicted = self._on_evicted

    def _on_evicted(self, key: tuple[int, bytes], block: int) -> None:
        if not self._blocks.groups[key[0]].spec.of_encoder:
            self._evicted.append((*key, block))

    # Loads

    def begin(
        self, request_id: str, seq_id: int, block_hashes: BlockHashes, limit: int, reserve: int
    ) -> bool:
        """Whether a tier has more of a sequence's first `limit` tokens than the device, and brings
        it: the sequence holds blocks for it then. `reserve`: as of `has_free`."""
        tier = None
        length = self._blocks.find_prefix(block_hashes, limit)
        for name, one in self.tiers.items():
            try:
                found = self._blocks.find_prefix(block_hashes, limit, one.find)
            except Exception:
                logger.exception("KV tier %r cannot be asked what it has", name)
                continue
            if found > length:
                tier = name
                length = found
        if tier is None:
            return False
        missing = self._adopt(seq_id, block_hashes, length, reserve)
        if missing is None:
            return False
        blocks = [TierBlock(tier, group, digest, block) for group, digest, block in missing]
        for group, digests in _by_group(blocks).items():
            self.tiers[tier].load(group, digests)
        ticket = next(self._tickets)
        deadline = time.monotonic() + self.tiers[tier].timeout
        self._loads[ticket] = _Load(request_id, length, tier, blocks, deadline)
        self._work.loads.append(TierLoad(ticket, blocks))
        return True

    def _adopt(
        self, seq_id: int, block_hashes: BlockHashes, num_tokens: int, reserve: int
    ) -> list[tuple[int, bytes, int]] | None:
        """As `BlockManager.adopt`, with new blocks for what is not cached: (group, digest, block)
        of each. They are to be filled, and published then. None: they do not fit."""
        missing: list[tuple[GroupBlocks, int, bytes]] = []
        found: list[tuple[GroupBlocks, int, int]] = []
        needed = [0] * len(self._blocks.pools)
        groups = [group for group in self._blocks.groups if not group.spec.of_encoder]
        for group in groups:
            first, last = group.prefix(num_tokens)
            digests = group.names(block_hashes, last)
            for index in range(first, last):
                block = group.pool.find((group.index, digests[index]))
                if block is None:
                    missing.append((group, index, digests[index]))
                else:
                    found.append((group, index, block))
                needed[group.pool_index] += block is None or group.pool.ref_counts[block] == 0
        if not self._blocks.has_free(needed, reserve):
            return None
        tables = self._blocks.new_tables(seq_id)
        for group in groups:
            tables[group.index] += [None] * group.prefix(num_tokens)[1]
        # Before others are taken: these could be among them.
        for group, index, block in found:
            group.pool.share(block)
            tables[group.index][index] = block
        new = []
        for group, index, digest in missing:
            tables[group.index][index] = block = group.pool.take()
            new.append((group.index, digest, block))
        return new

    def cancel(self, request_id: str) -> None:
        """A request that is being loaded has ended."""
        for ticket in [t for t, load in self._loads.items() if load.request_id == request_id]:
            del self._loads[ticket]
            self._work.cancelled.append(ticket)

    def expired(self, now: float) -> list[str]:
        """The requests whose blocks have not come in time: they come no more."""
        late = [load.request_id for load in self._loads.values() if now >= load.deadline]
        for request_id in late:
            self.cancel(request_id)
        return late

    def take(self, plan: StepPlan, ended: Mapping[int, str]) -> list[tuple[str, int]]:
        """A step has told which loads have ended, and what went wrong, or "". Returns their
        requests, and how many of their tokens are there now: all, or 0."""
        if plan.tiers is not None and plan.tiers.waits:
            self._waits = False
        outcomes = []
        for ticket, error in ended.items():
            if (load := self._loads.pop(ticket, None)) is None:
                continue
            if error:
                logger.warning(
                    "KV tier %r: a load has failed, and the request computes itself: %s",
                    load.tier,
                    error,
                )
                for group, digests in _by_group(load.blocks).items():
                    self.tiers[load.tier].failed(group, digests)
            outcomes.append((load.request_id, 0 if error else load.num_tokens))
        return outcomes

    # Steps

    def end_step(self, *, idle: bool) -> TierWork | None:
        """What the planned step does for the tiers; None: nothing. `idle`: nobody runs, so that it
        may wait for a load to end."""
        self._offer()
        work = self._work
        waits = idle and bool(self._loads) and not self._waits
        if not ((self._loads and not idle) or waits or work.stores or work.loads or work.cancelled):
            return None
        self._work = TierWork()
        work.waits = self._waits = waits
        return work

    def _offer(self) -> None:
        """Each content that the device gives up goes to the first tier that wants it."""
        if not self._evicted:
            return
        contents = {(group, digest): block for group, digest, block in self._evicted}
        self._evicted.clear()
        for name, tier in self.tiers.items():
            for one in tier.evicted(list(contents)):
                self._work.stores.append(TierBlock(name, *one, contents.pop(one)))
            self._work.dropped += [TierBlock(name, *one, -1) for one in tier.dropped()]

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Steps have failed: no load goes on, and what these plans were to store is not there."""
        self._work = TierWork(cancelled=[*self._work.cancelled, *self._loads])
        self._loads.clear()
        self._evicted.clear()
        self._waits = False
        for plan in plans:
            for one in plan.tiers.stores if plan.tiers is not None else ():
                assert isinstance(one.key, bytes), "contents are stored by digest"
                self.tiers[one.tier].failed(one.group, [one.key])

    def forget_all(self) -> None:
        """Nobody will find what any tier holds now."""
        for tier in self.tiers.values():
            tier.reset()


def _by_group(blocks: Iterable[TierBlock]) -> dict[int, list[bytes]]:
    digests: dict[int, list[bytes]] = {}
    for one in blocks:
        assert isinstance(one.key, bytes), "contents are loaded by digest"
        digests.setdefault(one.group, []).append(one.key)
    return digests
