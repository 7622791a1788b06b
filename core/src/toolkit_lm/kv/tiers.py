"""Tiers: the scheduler's view of an engine's KV tiers, with their loads and stores."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from toolkit_lm.kv.block_manager import BlockManager
from toolkit_lm.kv.group_blocks import BlockHashes, GroupBlocks
from toolkit_lm.kv.tier import KVTier, Outcome
from toolkit_lm.messages import StepPlan, TierBlock, TierLoad, TierWork

logger = logging.getLogger(__name__)


class _Load(NamedTuple):
    request_id: str
    num_tokens: int
    """Number of the leader's tokens once all blocks are filled."""
    tier: str
    blocks: list[TierBlock]
    num_bytes: int
    began: float


_Filled = list[tuple[int, bytes, int]]
"""(group, digest, block) of each block."""


class Tiers:
    """Starts loads, records their end, and offers evicted blocks to the tiers.

    All transfers travel with plans (`StepPlan.tiers`), so that workers run them in the order of the
    steps. Workers write the blocks of those loads alone that the same plan names: the blocks of a
    load that is given up are free at once.
    """

    def __init__(
        self,
        tiers: Mapping[str, KVTier],
        blocks: BlockManager,
        seconds: Callable[[int], float | None] = lambda num_tokens: None,
    ) -> None:
        """`seconds`: about how long computing so many tokens takes."""
        self.tiers = tiers
        self._blocks = blocks
        self._seconds = seconds
        self._loads: dict[int, _Load] = {}
        """Loads that have not ended, by ticket."""
        self._tickets = count(1)
        self._work = TierWork()
        self._given_up = False
        """A load was given up since the last plan."""
        self._evicted: _Filled = []
        """Blocks evicted since the last plan."""
        self._published: _Filled = []
        """Blocks published since the last plan. This plan fills them."""
        self._running: deque[tuple[StepPlan | None, _Filled]] = deque()
        """Plans whose steps have not ended, with the blocks that they fill: these may come out
        wrong."""
        self._filled: _Filled = []
        """Blocks of steps that have ended, not offered yet."""
        self._waits = False
        """A plan that waits for a load is running."""
        for pool in blocks.pools if tiers else ():
            pool.on_evicted = self._on_evicted
            pool.on_published = self._on_published

    def _on_evicted(self, key: tuple[int, bytes], block: int) -> None:
        if not self._blocks.groups[key[0]].spec.of_encoder:
            self._evicted.append((*key, block))

    def _on_published(self, key: tuple[int, bytes], block: int) -> None:
        if not self._blocks.groups[key[0]].spec.of_encoder:
            self._published.append((*key, block))

    # Loads

    def begin(
        self, request_id: str, seq_id: int, block_hashes: BlockHashes, limit: int, reserve: int
    ) -> bool:
        """Starts a load if a tier has more of a sequence's first `limit` tokens than the device.
        Returns whether it did; the sequence then holds blocks for it. `reserve`: see
        `BlockManager.has_free`."""
        tier = None
        length = cached = self._blocks.find_prefix(block_hashes, limit)
        for name, candidate in self.tiers.items():
            try:
                found = self._blocks.find_prefix(block_hashes, limit, candidate.find)
            except Exception:
                logger.exception("KV tier %r cannot be asked what it has", name)
                continue
            if found > length:
                tier = name
                length = found
        if tier is None:
            return False
        seconds = self._seconds(length - cached)
        missing = self._adopt(
            seq_id,
            block_hashes,
            length,
            reserve,
            lambda num_bytes: self.tiers[tier].pays(num_bytes, seconds),
        )
        if missing is None:
            return False
        blocks = [TierBlock(tier, group, digest, block) for group, digest, block in missing]
        for group, digests in _by_group(blocks).items():
            self.tiers[tier].load(group, digests)
        ticket = next(self._tickets)
        num_bytes = sum(self._num_bytes(group) for group, _, _ in missing)
        self._loads[ticket] = _Load(request_id, length, tier, blocks, num_bytes, time.monotonic())
        self._work.loads.append(TierLoad(ticket, blocks))
        return True

    def _num_bytes(self, group: int) -> int:
        """Bytes of a block of this group."""
        found = self._blocks.config.groups[group]
        return len(found.layers) * found.spec.page_bytes

    def _adopt(
        self,
        seq_id: int,
        block_hashes: BlockHashes,
        num_tokens: int,
        reserve: int,
        pays: Callable[[int], bool],
    ) -> _Filled | None:
        """Adopts cached blocks like `BlockManager.adopt`, and allocates new blocks for the rest.
        These are still to be filled and then published. None: they do not fit, or loading their
        bytes does not pay."""
        missing: list[tuple[GroupBlocks, int, bytes]] = []
        found: list[tuple[GroupBlocks, int, int]] = []
        needed = [0] * len(self._blocks.pools)
        groups = [group for group in self._blocks.groups if not group.spec.of_encoder]
        for group in groups:
            for index, digest in group.wanted(block_hashes, num_tokens):
                block = group.pool.find((group.index, digest))
                if block is None:
                    missing.append((group, index, digest))
                else:
                    found.append((group, index, block))
                needed[group.pool_index] += block is None or group.pool.ref_counts[block] == 0
        num_bytes = sum(self._num_bytes(group.index) for group, _, _ in missing)
        if not (self._blocks.has_free(needed, reserve) and pays(num_bytes)):
            return None
        tables = self._blocks.new_tables(seq_id)
        for group in groups:
            tables[group.index] += [None] * group.prefix(num_tokens)[1]
        # Before other blocks are taken: these could be among them.
        for group, index, block in found:
            group.pool.share(block)
            tables[group.index][index] = block
        new = []
        for group, index, digest in missing:
            tables[group.index][index] = block = group.pool.allocate()
            new.append((group.index, digest, block))
        return new

    def cancel(self, request_id: str, outcome: Outcome = "cancelled") -> None:
        """Cancels the load of a request that has ended."""
        for ticket in [t for t, load in self._loads.items() if load.request_id == request_id]:
            self._tell(self._loads.pop(ticket), outcome)
            self._given_up = True

    def _tell(self, load: _Load, outcome: Outcome) -> None:
        seconds = time.monotonic() - load.began
        self.tiers[load.tier].ended(load.num_bytes, seconds, outcome)

    def expired(self, now: float) -> list[str]:
        """Cancels loads that are past their deadline, and returns their requests."""
        late = [
            load.request_id
            for load in self._loads.values()
            if now >= load.began + self.tiers[load.tier].timeout
        ]
        for request_id in late:
            self.cancel(request_id, "late")
        return late

    def finish_loads(self, plan: StepPlan, ended: Mapping[int, bool]) -> list[tuple[str, int]]:
        """Processes the loads that a step reports as ended, each with its success. Returns their
        requests, with the number of tokens now on the device: all, or 0."""
        if plan.tiers is not None and plan.tiers.waits:
            self._waits = False
        if any(running is plan for running, _ in self._running):
            running = None
            while running is not plan:
                running, filled = self._running.popleft()
                self._filled += filled
        outcomes = []
        for ticket, complete in ended.items():
            if (load := self._loads.pop(ticket, None)) is None:
                continue
            self._tell(load, "loaded" if complete else "failed")
            if not complete:
                self._given_up = True
                for group, digests in _by_group(load.blocks).items():
                    self.tiers[load.tier].failed(group, digests)
            outcomes.append((load.request_id, load.num_tokens if complete else 0))
        return outcomes

    # Steps

    def end_step(self, plan: StepPlan | None, *, idle: bool) -> TierWork | None:
        """Returns the planned step's transfers; None: there are none. `idle`: no request runs, so
        the step may wait for a load."""
        self._offer()
        if self._published:
            self._running.append((plan, self._published))
            self._published = []
        work = self._work
        waits = idle and bool(self._loads) and not self._waits
        if not (
            (self._loads and not idle)
            or waits
            or work.dropped
            or work.stores
            or work.loads
            or self._given_up
        ):
            return None
        self._work = TierWork()
        self._given_up = False
        work.loading = list(self._loads)
        work.waits = self._waits = waits
        return work

    def _offer(self) -> None:
        """Offers each evicted or filled block to the tiers in order; the first that wants it stores
        it."""
        if not (self._evicted or self._filled):
            return
        doubted = {block[:2] for _, running in self._running for block in running}
        evicted = {block[:2]: block[2] for block in self._evicted if block[:2] not in doubted}
        # Contents that were forgotten since are in doubt; evicted ones are offered as such.
        filled = {
            (group, digest): block
            for group, digest, block in self._filled
            if self._blocks.groups[group].pool.find((group, digest)) == block
        }
        self._evicted.clear()
        self._filled.clear()
        for name, tier in self.tiers.items():
            for contents, offer in ((evicted, tier.evicted), (filled, tier.filled)):
                for content in offer(list(contents)) if contents else ():
                    self._work.stores.append(TierBlock(name, *content, contents.pop(content)))
            self.drop(name)

    def drop(self, name: str) -> None:
        dropped = self.tiers[name].dropped()
        self._work.dropped += [TierBlock(name, *content, -1) for content in dropped]

    def reset(self, plans: Iterable[StepPlan]) -> None:
        """Steps have failed: all loads end, and what `plans` would have stored is missing."""
        self._given_up = self._given_up or bool(self._loads)
        self._loads.clear()
        for blocks in (self._evicted, self._published, self._running, self._filled):
            blocks.clear()
        self._waits = False
        lost = [self._work, *(plan.tiers for plan in plans if plan.tiers is not None)]
        self._work = TierWork(dropped=[block for work in lost for block in work.dropped])
        for block in (block for work in lost for block in work.stores):
            assert isinstance(block.key, bytes), "contents are stored by digest"
            self.tiers[block.tier].failed(block.group, [block.key])

    def forget_all(self) -> None:
        """Forgets the contents of all tiers."""
        for name, tier in self.tiers.items():
            tier.reset()
            self.drop(name)


def _by_group(blocks: Iterable[TierBlock]) -> dict[int, list[bytes]]:
    digests: dict[int, list[bytes]] = {}
    for block in blocks:
        assert isinstance(block.key, bytes), "contents are loaded by digest"
        digests.setdefault(block.group, []).append(block.key)
    return digests
