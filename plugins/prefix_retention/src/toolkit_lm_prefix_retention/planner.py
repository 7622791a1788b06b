"""Engine half: which blocks are retained, until when, and for which client."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from typing import Any

from msgspec import Raw, msgpack
from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import StepPlan
from toolkit_lm.scheduler import Planner, Request, Sequence
from toolkit_lm.step import worker_method

from toolkit_lm_prefix_retention.config import Range
from toolkit_lm_prefix_retention.front import PART, Retention
from toolkit_lm_prefix_retention.order import PriorityBlocks

Mark = tuple[int, tuple[int, bytes]]
"""Index of a pool, and the key of contents in it."""


class RetentionPlanner(Planner):
    """Marks the contents of prompts and answers with priorities, by which the pools then evict.

    Bounds are numbers of marks: a client beyond its own loses those that it used longest ago. If
    all clients together are beyond theirs, the client with the most marks does.
    """

    def __init__(self, config: VllmConfig, facts: Raw, *, options: Any) -> None:
        self._options = options
        self._marks: dict[str, OrderedDict[Mark, float]] = {}
        """By client: the time.monotonic() at which each mark ends, the least recently used
        first."""
        self._orders: list[PriorityBlocks] = []
        """Of each pool, once a request has asked for anything."""
        self._decoding: dict[str, Retention] = {}
        """Requests whose generated tokens have a priority of their own."""
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
        if share is None or not self._limit:
            return
        if not self._orders:
            for pool in self.engine.scheduler.blocks.pools:
                self._orders.append(PriorityBlocks())
                pool.order_by(self._orders[-1])
        asked = msgpack.decode(share, type=Retention)
        if asked.ranges:
            self._retain(request, asked, now)
        if asked.decode is not None:
            self._decoding[request.request_id] = asked

    def release(self, request_id: str) -> None:
        self._decoding.pop(request_id, None)

    def stored(self, seq: Sequence, group: Any, indices: list[int]) -> None:
        if not self._decoding:
            return
        asked = self._decoding.get(seq.request.request_id)
        if asked is None or asked.decode is None:
            return
        end = time.monotonic() + asked.decode.seconds
        count = indices[-1] + 1 + group.later
        hashes = seq.block_hashes(group.size, count)
        for index in indices:
            # A block with tokens of both is the prompt's.
            if index * group.size >= seq.request.num_prompt_tokens:
                mark = group.pool_index, (group.index, hashes[index + group.later])
                self._mark(mark, asked.client, end, asked.decode.priority)
        self._keep_bounds(asked.client)

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
        own_limit = int(self._limit * self._options.client_share)
        wanted = self._contents(request, asked.ranges, own_limit)
        # Blocks behind need those before: the first are let go last.
        for mark, part in reversed(wanted):
            self._mark(mark, asked.client, now + part.seconds, part.priority)
        self._keep_bounds(asked.client)

    def _keep_bounds(self, client: str) -> None:
        """Lets marks go, of this client and of the one with the most, until all have their part."""
        limit = self._limit
        own_limit = int(limit * self._options.client_share)
        while client in self._marks and len(self._marks[client]) > own_limit:
            self._let_go(next(iter(self._marks[client])))
        while len(self._owners) > limit:
            most = max(self._marks, key=lambda client: len(self._marks[client]))
            self._let_go(next(iter(self._marks[most])))

    def _contents(
        self, request: Request, ranges: list[Range], most: int
    ) -> list[tuple[Mark, Range]]:
        """What a cached prefix of the prompt needs within the ranges, in the order of its tokens:
        of the longest prefix that needs at most so many blocks there."""
        blocks = self.engine.scheduler.blocks
        border = blocks.border
        beyond = max(group.beyond for group in blocks.groups)
        first = 0
        last = max(0, request.num_prompt_tokens - 1 - beyond) // border
        found: list[tuple[Mark, Range]] = []
        # Most prompts fit: the longest is tried first.
        number = last
        while first < last:
            tried = self._needed(request, ranges, number * border)
            if len(tried) <= most:
                first = number
                found = tried
            else:
                last = number - 1
            number = (first + last + 1) // 2
        return found

    def _needed(
        self, request: Request, ranges: list[Range], num_tokens: int
    ) -> list[tuple[Mark, Range]]:
        placed = []
        for group in self.engine.scheduler.blocks.groups:
            if group.spec.of_encoder:
                continue
            for index, digest in group.wanted(request.leader.block_hashes, num_tokens):
                start = index * group.size
                # A block is of the range that has its first token; a state, of its last one's.
                position = num_tokens - 1 if group.spec.snapshots else start
                part = next((part for part in ranges if part.holds(position)), None)
                if part is not None:
                    placed.append((start, (group.pool_index, (group.index, digest)), part))
        placed.sort(key=lambda each: each[:2])
        return [(mark, part) for _, mark, part in placed]

    def _mark(self, mark: Mark, client: str, end: float, priority: int) -> None:
        """Marks contents. They may be another client's: the last one to ask has them."""
        pool, key = mark
        order = self._orders[pool]
        if (owner := self._owners.get(mark)) is not None:
            if order.priorities.get(key) == priority:
                end = max(end, self._marks[owner][mark])
            self._forget(mark)
        self._owners[mark] = client
        self._marks.setdefault(client, OrderedDict())[mark] = end
        self._next_end = min(self._next_end, end)
        order.set_priority(key, priority, self.engine.scheduler.blocks.pools[pool].find(key))

    def _forget(self, mark: Mark) -> None:
        client = self._owners.pop(mark)
        del self._marks[client][mark]
        if not self._marks[client]:
            del self._marks[client]

    def _let_go(self, mark: Mark) -> None:
        self._forget(mark)
        pool, key = mark
        block = self.engine.scheduler.blocks.pools[pool].find(key)
        self._orders[pool].set_priority(key, None, block)

    def _end_expired(self, now: float) -> None:
        ends = [(end, mark) for marks in self._marks.values() for mark, end in marks.items()]
        for end, mark in ends:
            if end <= now:
                self._let_go(mark)
        self._next_end = min((end for end, _ in ends if end > now), default=math.inf)
