"""Engine half: which blocks are retained, until when, and for which client."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Planner, Request
from toolkit_lm.step import worker_method

from toolkit_lm_prefix_retention.front import PART, Retention

Mark = tuple[int, tuple[int, bytes]]
"""Index of a pool, and the key of contents in it."""


class RetentionPlanner(Planner):
    """Marks the contents of prompts, whose blocks the pools then evict last.

    Bounds are numbers of marks: a client beyond its own loses those that it used longest ago. If
    all clients together are beyond theirs, the client with the most marks does.
    """

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self._options = options
        self._marks: dict[str, OrderedDict[Mark, float]] = {}
        """By client: the time.monotonic() at which each mark ends, the least recently used
        first."""
        self._owners: dict[Mark, str] = {}
        self._next_end = math.inf
        """No mark ends before it."""

    def begin(self, plan: StepPlan, request: Request) -> None:
        share = request.inputs.parts.get(PART)
        if share is None and not self._owners:
            return
        now = time.monotonic()
        if now >= self._next_end:
            self._end_expired(now)
        if share is not None and self._limit:
            self._retain(request, msgpack.decode(share, type=Retention), now)

    @worker_method
    def num_retained(self) -> dict[str, int]:
        """Returns the number of marks of each client."""
        return {client: len(marks) for client, marks in self._marks.items()}

    @property
    def _limit(self) -> int:
        """Most marks of all clients."""
        pools = self.engine.scheduler.blocks.pools
        return int(self._options.share * sum(pool.num_blocks for pool in pools))

    def _retain(self, request: Request, asked: Retention, now: float) -> None:
        """Marks a prompt, or as much of its beginning as the client may have."""
        limit = self._limit
        own_limit = int(limit * self._options.client_share)
        wanted = self._contents(request, own_limit)
        end = now + asked.seconds
        # Blocks behind need those before: the first are let go last.
        for mark in reversed(wanted):
            self._mark(mark, asked.client, end)
        while asked.client in self._marks and len(self._marks[asked.client]) > own_limit:
            self._let_go(next(iter(self._marks[asked.client])))
        while len(self._owners) > limit:
            most = max(self._marks, key=lambda client: len(self._marks[client]))
            self._let_go(next(iter(self._marks[most])))

    def _contents(self, request: Request, most: int) -> list[Mark]:
        """What a cached prefix of the prompt needs, in the order of its tokens: the longest prefix
        that needs at most so many blocks."""
        border = self.engine.scheduler.blocks.border
        first = 0
        last = (request.num_prompt_tokens - 1) // border
        found: list[Mark] = []
        # Most prompts fit: the longest is tried first.
        number = last
        while first < last:
            tried = self._needed(request, number * border)
            if len(tried) <= most:
                first = number
                found = tried
            else:
                last = number - 1
            number = (first + last + 1) // 2
        return found

    def _needed(self, request: Request, num_tokens: int) -> list[Mark]:
        placed = []
        for group in self.engine.scheduler.blocks.groups:
            if not group.spec.of_encoder:
                for index, digest in group.wanted(request.leader.block_hashes, num_tokens):
                    mark = group.pool_index, (group.index, digest)
                    placed.append((index * group.size, mark))
        return [mark for _, mark in sorted(placed)]

    def _mark(self, mark: Mark, client: str, end: float) -> None:
        """Marks contents. They may be another client's: the last one to ask has them."""
        pool, key = mark
        if (owner := self._owners.get(mark)) is not None:
            end = max(end, self._marks[owner][mark])
            self._forget(mark)
        self._owners[mark] = client
        self._marks.setdefault(client, OrderedDict())[mark] = end
        self._next_end = min(self._next_end, end)
        self.engine.scheduler.blocks.pools[pool].retain(key)

    def _forget(self, mark: Mark) -> None:
        client = self._owners.pop(mark)
        del self._marks[client][mark]
        if not self._marks[client]:
            del self._marks[client]

    def _let_go(self, mark: Mark) -> None:
        self._forget(mark)
        pool, key = mark
        self.engine.scheduler.blocks.pools[pool].let_go(key)

    def _end_expired(self, now: float) -> None:
        ends = [(end, mark) for marks in self._marks.values() for mark, end in marks.items()]
        for end, mark in ends:
            if end <= now:
                self._let_go(mark)
        self._next_end = min((end for end, _ in ends if end > now), default=math.inf)
