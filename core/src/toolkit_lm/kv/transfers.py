"""Transfers: moves blocks between the device and the tiers, as plans require."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from enum import IntEnum

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv.cache import KVCache
from toolkit_lm.kv.group_blocks import HOST
from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.kv.tier import Data, KVTierStore
from toolkit_lm.messages import StepPlan, TierBlock, TierWork
from toolkit_lm.plugin import Plugins

logger = logging.getLogger(__name__)

_WAIT = 0.02
"""Seconds that a step without rows waits for loads. An abort waits as long."""
_MOST_BYTES = 64 * 2**20
"""Most bytes of loaded blocks that one step writes to the device, so that its rows do not wait
long."""
_Loading = list[tuple[TierBlock, Future[Data] | None]]
"""None: the data are not asked for yet, nor those of later blocks."""


class LoadState(IntEnum):
    """State of a load. Over several ranks, the greatest of their states is the load's state."""

    COMPLETE = 0
    LOADING = 1
    FAILED = 2


class Transfers:
    """Runs on the thread of the steps, so its writes to the device are ordered with theirs."""

    def __init__(
        self,
        cache: KVCache,
        stores: Mapping[str, KVTierStore],
        agree: Callable[[list[int]], list[int]] = lambda states: states,
    ) -> None:
        """`agree` is given the `LoadState` of each load on this rank, and returns those over all
        ranks. All ranks call it in the same steps, for the same loads."""
        self._cache = cache
        self._stores = stores
        self._agree = agree
        self._loads: dict[int, _Loading | None] = {}
        """Blocks that are not on the device yet, by ticket. None: the load has failed."""

    def run(self, plan: StepPlan) -> dict[int, bool]:
        """Runs all transfers of a plan: out to the tiers, in from them, then on the device. Returns
        the loads that have ended, by ticket: whether all ranks have filled all blocks."""
        work = plan.tiers
        if work is not None:
            self._begin(work)
        for copy in plan.swap_out:
            block = self._cache.block(copy.group, copy.source)
            self._stores[HOST].store(copy.group, copy.target, block)
        for copy in plan.swap_in:
            data = self._stores[HOST].load(copy.group, copy.source).result()
            self._cache.block(copy.group, copy.target).write(data, checked=False)
        ended = self._end(work) if work is not None and work.loading else {}
        for copy in plan.copies:
            self._cache.copy(copy)
        return ended

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _begin(self, work: TierWork) -> None:
        self._loads = {t: load for t, load in self._loads.items() if t in work.loading}
        for tier_block in work.dropped:
            self._stores[tier_block.tier].drop(tier_block.group, tier_block.key)
        for tier_block in work.stores:
            block = self._cache.block(tier_block.group, tier_block.block)
            try:
                self._stores[tier_block.tier].store(tier_block.group, tier_block.key, block)
            except Exception:
                # The request that asks for it will miss it.
                logger.exception("KV tier %r: a block could not be stored", tier_block.tier)
        for load in work.loads:
            self._loads[load.ticket] = [(block, None) for block in load.blocks]

    def _load(self, block: TierBlock) -> Future[Data]:
        try:
            return self._stores[block.tier].load(block.group, block.key)
        except Exception as error:
            failed: Future[Data] = Future()
            failed.set_exception(error)
            return failed

    def _end(self, work: TierWork) -> dict[int, bool]:
        """Writes the data that have arrived to their blocks. A step that waits does so until a load
        has ended."""
        until = time.monotonic() + _WAIT if work.waits else 0.0
        left = self._write(_MOST_BYTES)
        while (
            self._loads and all(self._loads.values()) and (seconds := until - time.monotonic()) > 0
        ):
            if left > 0:
                first = [load[0][1] for load in self._loads.values() if load]
                wait([future for future in first if future], seconds, FIRST_COMPLETED)
            left = self._write(_MOST_BYTES)
        states = self._agree([self._state(ticket) for ticket in work.loading])
        return {
            ticket: state == LoadState.COMPLETE
            for ticket, state in zip(work.loading, states, strict=True)
            if state != LoadState.LOADING
        }

    def _write(self, left: int) -> int:
        """Writes at most about `left` bytes that have arrived. Returns how many are left of it."""
        for ticket, blocks in self._loads.items():
            if blocks and left > 0 and blocks[0][1] is None:
                left = self._fill(blocks, left)
            while blocks and left > 0 and (future := blocks[0][1]) and future.done():
                tier_block, _ = blocks.pop(0)
                block = self._cache.block(tier_block.group, tier_block.block)
                left -= block.num_bytes
                try:
                    block.write(future.result(), checked=self._stores[tier_block.tier].checked)
                except Exception as error:
                    logger.warning(
                        "KV tier %r: a load has failed, and the request computes itself: %s: %s",
                        tier_block.tier,
                        type(error).__name__,
                        error,
                    )
                    self._loads[ticket] = None
                    break
        return left

    def _fill(self, blocks: _Loading, left: int) -> int:
        """Fills at most about `left` bytes of blocks whose data are at hand. Once some are not, all
        others are asked for. Returns how many bytes are left."""
        wanted = []
        for block, _ in blocks:
            if left <= 0:
                break
            target = self._cache.block(block.group, block.block)
            wanted.append((block.group, block.key, target))
            left -= target.num_bytes
        try:
            filled = self._stores[blocks[0][0].tier].fill(wanted)
        except Exception:
            logger.exception("KV tier %r: blocks are loaded one by one", blocks[0][0].tier)
            filled = 0
        del blocks[:filled]
        if filled < len(wanted):
            left += sum(target.num_bytes for _, _, target in wanted[filled:])
            blocks[:] = [(block, self._load(block)) for block, _ in blocks]
        return left

    def _state(self, ticket: int) -> LoadState:
        # A rank that missed the step which began the load has failed.
        blocks = self._loads.get(ticket)
        if blocks is None:
            return LoadState.FAILED
        return LoadState.LOADING if blocks else LoadState.COMPLETE


def make_stores(
    config: VllmConfig, kv_cache: KVCacheConfig, plugins: Plugins
) -> dict[str, KVTierStore]:
    """Makes the worker half of each tier, by tier name. Raises PluginError, which names the plugin,
    for one that cannot be made."""
    return {
        entry.key: plugins.kv_tiers.make(
            entry.key, config, kv_cache, options=plugins.options(entry.plugin)
        )
        for entry in plugins.kv_tiers.entries()
    }
