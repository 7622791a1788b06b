"""NamingPlanner: the named prefixes, beside the figures of the tiers. Needs no torch."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Request
from toolkit_lm.step import worker_method
from toolkit_lm_kv_tiers.planner import TierPlanner

from toolkit_lm_kv_disk.segments import Key
from toolkit_lm_kv_disk.share import PART, Drop, OnDisk, Prefix, Prefixes, Save, Saved
from toolkit_lm_kv_disk.tier import DiskTier, LruTier

_OFFERING = 10.0
"""Most seconds after the end of a request until the tier has all of its blocks."""
_MOST_SAVING = 16
"""Most prompts that are on their way to a name. The oldest one loses its place."""
DEVICE = "device"
"""The KV cache of the device, among the names of tiers."""


class _Saving(NamedTuple):
    asked: Save
    block_hashes: Callable[[int, int], Sequence[bytes]]
    limit: int
    """Number of the prompt's tokens that a prefix could have."""
    deadline: float | None = None
    """time.monotonic() until which the tier may take blocks; None: the request still runs."""


class NamingPlanner(TierPlanner):
    """Gives the prompts of requests names, once the tier on disk has their blocks."""

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        super().__init__(config, facts, options=options)
        self._saving: OrderedDict[str, _Saving] = OrderedDict()
        """Prompts that are on their way to a name, by it."""
        self._has_dropped = False
        """A step is to tell the workers what the tiers have dropped."""

    def begin(self, plan: StepPlan, request: Request) -> None:
        super().begin(plan, request)
        if (share := request.inputs.parts.get(PART)) is None or self._disk is None:
            return
        asked = msgpack.decode(share, type=Save)
        blocks = self.engine.scheduler.blocks
        beyond = max(group.beyond for group in blocks.groups)
        limit = max(0, request.num_prompt_tokens - 1 - beyond) // blocks.border * blocks.border
        hashes = request.leader.block_hashes
        self._saving[asked.name] = _Saving(asked, hashes, limit)
        if len(self._saving) > _MOST_SAVING:
            self._saving.popitem(last=False)
        # The tier is offered what a step fills. What the device has already counts as filled anew.
        keys = self._keys(hashes, limit)
        self._disk.expect(keys)
        for key in keys:
            pool = blocks.groups[key[0]].pool
            if (block := pool.find(key)) is not None and pool.on_published is not None:
                pool.on_published(key, block)

    def awaits(self) -> bool:
        # Blocks are offered, and drops are told, when a step is planned.
        now = time.monotonic()
        return self._has_dropped or any(
            saving.deadline is not None and saving.deadline > now
            for saving in self._saving.values()
        )

    def end_step(self) -> Raw | None:
        self._has_dropped = False
        return None

    def reset(self, plans: Any) -> None:
        self._saving.clear()

    @worker_method
    def saved(self, name: str) -> Saved:
        """Names the prefix of a request that has ended, once the tier has its blocks."""
        disk = self._disk
        if disk is None:
            return Saved("refused", "the tier kv_disk is off: the log of the server says why")
        if (saving := self._saving.get(name)) is None:
            return Saved("unknown")
        now = time.monotonic()
        deadline = saving.deadline or now + _OFFERING
        self._saving[name] = saving._replace(deadline=deadline)
        length = self._held(disk, saving)
        if length < saving.limit and now < deadline:
            return Saved("waits")
        del self._saving[name]
        if not length:
            border = self.engine.scheduler.blocks.border
            return Saved(
                "refused",
                f"the prompt is too short: prefixes end at multiples of {border} tokens"
                if not saving.limit
                else "the tier has not taken the prompt's blocks",
            )
        keys = self._keys(saving.block_hashes, length)
        reason = disk.name_prefix(name, length, saving.asked.salt, keys)
        if reason is not None:
            return Saved("refused", reason)
        prefixes = disk.named_prefixes().prefixes
        prefix = next(prefix for prefix in prefixes if prefix.name == name)
        return Saved("saved", prefix=prefix)

    @worker_method
    def prefixes(self) -> Prefixes:
        """Returns the named prefixes."""
        return Prefixes([], 0, 0) if self._disk is None else self._disk.named_prefixes()

    @worker_method
    def on_disk(self, name: str) -> list[OnDisk]:
        """Returns where the blocks of a named prefix are; empty: there is none of this name."""
        place = None if self._disk is None else self._disk.place_of(name)
        return [] if place is None else [place]

    @worker_method
    def drop_prefixes(self, asked: Drop) -> list[Prefix]:
        """Drops named prefixes, with their blocks in all tiers and on the device that no other one
        needs. Returns them."""
        if (disk := self._disk) is None:
            return []
        gone = [
            prefix
            for prefix in disk.named_prefixes().prefixes
            if asked.name in (None, prefix.name) and asked.salt in (None, prefix.salt)
        ]
        names = set(disk.drop_names([prefix.name for prefix in gone]))
        for pool in self.engine.scheduler.blocks.pools:
            # The names of the tier on disk may tell nothing of the digests.
            for key, block in [*pool._blocks.items()]:
                if disk.name_of(key) in names:
                    pool.forget(block)
        tiers = self.engine.scheduler.tiers
        for name, tier in tiers.tiers.items():
            if isinstance(tier, LruTier):
                tier.drop(names, disk.name_of if tier is not disk else None)
                tiers.drop(name)
        self._has_dropped = bool(names)
        return gone

    @worker_method
    def reset_tier(self, name: str) -> None:
        """Forgets what a tier, or the device, has. Raises RequestError for an unknown name."""
        tiers = self.engine.scheduler.tiers
        if name == DEVICE:
            for pool in self.engine.scheduler.blocks.pools:
                pool.forget_all()
        elif name in tiers.tiers:
            tiers.tiers[name].reset()
            tiers.drop(name)
            self._has_dropped = True
        else:
            known = ", ".join((DEVICE, *tiers.tiers))
            raise RequestError(f"there is no KV tier {name!r}. There are: {known}.", "tier")

    @property
    def _disk(self) -> DiskTier | None:
        tier = self.engine.scheduler.tiers.tiers.get(PART)
        return tier if isinstance(tier, DiskTier) else None

    def _keys(self, hashes: Callable[[int, int], Sequence[bytes]], num_tokens: int) -> list[Key]:
        """The blocks that a prefix of so many tokens needs."""
        return [
            (group.index, digest)
            for group in self.engine.scheduler.blocks.groups
            if num_tokens and not group.spec.of_encoder
            for _, digest in group.wanted(hashes, num_tokens)
        ]

    def _held(self, disk: DiskTier, saving: _Saving) -> int:
        """Number of the prompt's first tokens that are a prefix in the tier."""
        blocks = self.engine.scheduler.blocks
        length = saving.limit
        while length:
            gap = None
            for group in blocks.groups:
                if group.spec.of_encoder:
                    continue
                for index, digest in group.wanted(saving.block_hashes, length):
                    if not disk.holds((group.index, digest)):
                        start = length - 1 if group.spec.snapshots else index * group.size
                        gap = start if gap is None else min(gap, start)
                        break
            if gap is None:
                return length
            length = min(gap, length - 1) // blocks.border * blocks.border
        return 0
