"""TransferTier: which blocks peers have, and which are offered to them. Needs no torch."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, ClassVar

from toolkit_lm.config import VllmConfig
from toolkit_lm.kv import KVCacheConfig, KVTier, Outcome
from toolkit_lm_kv_tiers.limits import why_off

from toolkit_lm_kv_transfer.settings import peers_of
from toolkit_lm_kv_transfer.share import Content, Counts, short

logger = logging.getLogger(__name__)


class TransferTier(KVTier):
    """Requests say what is offered and what is fetched: the planner calls this tier's methods."""

    timeout: ClassVar[float] = 3600.0
    """The worker's half gives up peers that bring nothing."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, *, options: Any) -> None:
        self.counts = Counts()
        self._lease = 0.0
        self._announced: Counter[tuple[int, int]] = Counter()
        """Numbers of blocks that peers have, with that of the requests that say so."""
        self._wanted: dict[Content, list[set[Content]]] = {}
        """Blocks that requests will offer, with what each of these lacks yet."""
        self._once: Counter[Content] = Counter()
        """Blocks that are offered when the planner shows them."""
        self._stored: OrderedDict[Content, float] = OrderedDict()
        """Blocks that the worker's half may hold, with the time.monotonic() of each."""
        self._gone: list[Content] = []
        if options is None or (options.listen is None and not peers_of(options)):
            self.is_off = True
            return
        self._lease = options.lease
        if (reason := why_off(kv_cache)) is not None:
            logger.warning("kv_transfer moves no KV blocks: %s", reason)
            self.is_off = True

    # Blocks that peers have

    def announce(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Peers have these blocks: group and number of each."""
        self._announced.update(blocks)

    def forget(self, blocks: Iterable[tuple[int, int]]) -> None:
        """Takes back what a request has announced."""
        self._announced.subtract(blocks)
        self._announced = +self._announced

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        if not self._announced:
            return 0
        return sum(1 for _ in takewhile(lambda d: (group, short(d)) in self._announced, digests))

    def ended(self, num_bytes: int, seconds: float, outcome: Outcome) -> None:
        self.count(outcome)
        if outcome == "loaded":
            self.counts.loaded_bytes += num_bytes
            self.counts.load_seconds += seconds

    def count(self, outcome: str) -> None:
        """Counts the end of a load."""
        self.counts.loads[outcome] = self.counts.loads.get(outcome, 0) + 1

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._announced.pop((group, short(digest)), None)
            self._stored.pop((group, digest), None)

    # Blocks that are offered to peers

    def want(self, contents: set[Content]) -> None:
        """A request will offer these blocks: each is taken as soon as it is filled, and then
        removed from the set."""
        for content in contents:
            self._wanted.setdefault(content, []).append(contents)

    def unwant(self, contents: set[Content]) -> None:
        """The request has ended, or offers the rest of the set otherwise."""
        for content in contents:
            sets = [each for each in self._wanted.pop(content, []) if each is not contents]
            if sets:
                self._wanted[content] = sets

    def offer(self, contents: Iterable[Content]) -> None:
        """Takes these blocks when they are shown."""
        self._once.update(contents)

    def filled(self, contents: Sequence[Content]) -> Sequence[Content]:
        return self._wanted_of(contents)

    def evicted(self, contents: Sequence[Content]) -> Sequence[Content]:
        return self._wanted_of(contents)

    def _wanted_of(self, contents: Sequence[Content]) -> list[Content]:
        if not (self._wanted or self._once):
            return []
        taken = []
        now = time.monotonic()
        for content in contents:
            if self._once[content] > 0:
                self._once[content] -= 1
            elif sets := self._wanted.get(content):
                sets.pop(0).discard(content)
                if not sets:
                    del self._wanted[content]
            else:
                continue
            taken.append(content)
            self._stored[content] = now
            self._stored.move_to_end(content)
        self._once = +self._once
        while self._stored and now - next(iter(self._stored.values())) > self._lease:
            self._stored.popitem(last=False)
        return taken

    def dropped(self) -> list[Content]:
        gone, self._gone = self._gone, []
        return gone

    def reset(self) -> None:
        self._announced.clear()
        self._once.clear()
        self._gone += self._stored
        self._stored.clear()
