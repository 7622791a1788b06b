"""Transfers: moves blocks between the device and the tiers, as plans say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait

from toolkit_lm.kv.cache import KVCache
from toolkit_lm.kv.group_blocks import HOST
from toolkit_lm.kv.tier import Data, KVTierStore
from toolkit_lm.messages import StepPlan, TierBlock, TierWork

logger = logging.getLogger(__name__)

_WAIT = 0.02
"""Seconds that a step without rows waits for a load: as long does an abort wait for it."""
_MOST_BYTES = 64 * 2**20
"""Of loaded blocks that one step writes to the device, so that its rows do not wait long."""


class Transfers:
    """Runs on the thread of the steps: what it writes to the device is in their order."""

    def __init__(self, cache: KVCache, stores: Mapping[str, KVTierStore]) -> None:
        self._cache = cache
        self._stores = stores
        self._loads: dict[int, list[tuple[TierBlock, Future[Data]]]] = {}
        """By ticket, blocks that are not on the device yet."""

    def run(self, plan: StepPlan) -> dict[int, str]:
        """All that a plan moves: out to the tiers, in from them, then on the device. Returns the
        loads that have ended, by ticket, with what went wrong, or ""."""
        work = plan.tiers
        if work is not None:
            self._begin(work)
        for copy in plan.swap_out:
            block = self._cache.block(copy.group, copy.source)
            self._stores[HOST].store(copy.group, copy.target, block)
        for copy in plan.swap_in:
            data = self._stores[HOST].load(copy.group, copy.source).result()
            self._cache.block(copy.group, copy.target).write(data, checked=False)
        ended = self._end(waits=work.waits) if work is not None else {}
        for copy in plan.copies:
            self._cache.copy(copy)
        return ended

    def close(self) -> None:
        for store in self._stores.values():
            store.close()

    def _begin(self, work: TierWork) -> None:
        for ticket in work.cancelled:
            self._loads.pop(ticket, None)
        for one in work.dropped:
            self._stores[one.tier].drop(one.group, one.key)
        for one in work.stores:
            block = self._cache.block(one.group, one.block)
            try:
                self._stores[one.tier].store(one.group, one.key, block)
            except Exception:
                # Who asks for it will miss it.
                logger.exception("KV tier %r: a block could not be stored", one.tier)
        for load in work.loads:
            self._loads[load.ticket] = [(one, self._load(one)) for one in load.blocks]

    def _load(self, one: TierBlock) -> Future[Data]:
        try:
            return self._stores[one.tier].load(one.group, one.key)
        except Exception as error:
            failed: Future[Data] = Future()
            failed.set_exception(error)
            return failed

    def _end(self, *, waits: bool) -> dict[int, str]:
        """Writes what has come to its blocks."""
        if waits and self._loads:
            wait([blocks[0][1] for blocks in self._loads.values()], _WAIT, FIRST_COMPLETED)
        ended = {}
        left = _MOST_BYTES
        for ticket, blocks in list(self._loads.items()):
            error = ""
            while blocks and not error and left > 0 and blocks[0][1].done():
                one, future = blocks.pop(0)
                block = self._cache.block(one.group, one.block)
                left -= block.num_bytes
                try:
                    block.write(future.result(), checked=self._stores[one.tier].checked)
                except Exception as problem:
                    error = f"{type(problem).__name__}: {problem}"
            if error or not blocks:
                del self._loads[ticket]
                ended[ticket] = error
        return ended
