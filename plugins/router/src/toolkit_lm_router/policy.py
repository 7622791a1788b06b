"""The routing policy: which backend gets a request. It knows no HTTP, and no clock."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

from toolkit_lm_router.prefixes import PrefixIndex, bits, num_bytes

Reason = Literal["session", "prefix", "load"]

_SLACK = 4
"""Requests beyond the mean that a backend may always have: a mean of few requests says little."""
_MOST_SESSIONS = 65_536
_TRIES = 8
"""Most backends with the same prefix that are compared."""
_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
"""Together they spread 64 bits: Knuth's multiplicative hash."""


def mark_of(name: str) -> int:
    """64 bits that stand for a name, the same in each process."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


class Loaded(Protocol):
    """A backend, as the policy sees it."""

    @property
    def number(self) -> int:
        """The backend's bit in the index of prefixes."""

    @property
    def mark(self) -> int:
        """64 bits that stand for it in all routers."""

    @property
    def load(self) -> int:
        """Requests under way."""

    @property
    def has_room(self) -> bool:
        """Whether it may get one more request."""


class Choice(NamedTuple):
    """The backend that a request goes to."""

    number: int
    reason: Reason
    num_chunks: int
    """Chunks of the prompt that the backend has had before."""


@dataclass(slots=True)
class Wanted:
    """Parts of a request that the policy reads."""

    digests: Sequence[int] = ()
    """Digests of the prompt's chunks."""
    session: str = ""
    """Name of the session; empty: none."""


@dataclass(slots=True)
class RoutingPolicy:
    """Chooses by session, then by prefix, then the less loaded of two random backends. One of
    several routers draws the backend of a session that it does not know by a hash, as the others
    do.

    A backend whose load is above `balance` times the mean gets no request for its session or its
    prefix: a hot prefix spreads over several. Engines with one policy must be used in one thread.
    """

    prefix_match: float = 0.25
    balance: float = 1.5
    max_prefix_bytes: int = 8 * 2**20
    follows_events: bool = False
    """Backends tell of their caches."""
    has_peers: bool = False
    """Other routers send requests to the same backends."""
    random: random.Random = field(default_factory=random.Random)
    index: PrefixIndex = field(init=False)
    _sessions: OrderedDict[str, int] = field(init=False, default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.index = PrefixIndex(self.max_prefix_bytes, is_told=self.follows_events)

    def choose(
        self,
        wanted: Wanted,
        backends: Sequence[Loaded],
        by_number: Mapping[int, Loaded],
        allowed: int,
        total: int,
        without: Collection[int] = (),
    ) -> Choice | None:
        """The backend of a request. None: none has room.

        `backends`: those that can serve it. `by_number`: all by number. `allowed`: the bits of
        `backends`. `total`: the sum of their loads. `without`: numbers that have failed it.
        """
        if not backends:
            return None
        most = max(self.balance * total / len(backends), total / len(backends) + _SLACK)
        for failed in without:
            allowed &= ~(1 << failed)

        def fits(number: int) -> bool:
            backend = by_number[number]
            return backend.has_room and backend.load <= most

        matches = self.index.matches(wanted.digests, allowed) if wanted.digests else []
        home = self._sessions.get(wanted.session) if wanted.session else None
        if home is not None and allowed >> home & 1 and fits(home):
            return Choice(home, "session", self._depth(matches, home))
        least = self.prefix_match * num_bytes(len(wanted.digests))
        for depth, mask in matches:
            if num_bytes(depth) < least:
                break
            if fitting := self._some(mask, backends, fits):
                number = min(fitting, key=lambda number: by_number[number].load)
                return Choice(number, "prefix", depth)
        if self.has_peers and wanted.session:
            able = [b for b in backends if allowed >> b.number & 1 and fits(b.number)]
            if able:
                home = _of_session(wanted.session, able)
                return Choice(home, "session", self._depth(matches, home))
        drawn = self._of_two(backends, without)
        return None if drawn is None else Choice(drawn, "load", self._depth(matches, drawn))

    def sent(self, wanted: Wanted, number: int) -> None:
        """A backend was sent the request."""
        self.index.add(number, wanted.digests)
        if wanted.session:
            self._sessions[wanted.session] = number
            self._sessions.move_to_end(wanted.session)
            if len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def _some(
        self, mask: int, backends: Sequence[Loaded], fits: Callable[[int], bool]
    ) -> list[int]:
        """Numbers of the mask that fit; of many only a random few."""
        if mask.bit_count() <= _TRIES:
            return bits(mask, fits)
        drawn = self.random.choices(backends, k=2 * _TRIES)
        return [b.number for b in drawn if mask >> b.number & 1 and fits(b.number)]

    def _of_two(self, backends: Sequence[Loaded], without: Collection[int]) -> int | None:
        """The less loaded of two random backends with room, of all where neither has any."""
        pair = (self.random.choice(backends), self.random.choice(backends))
        for some in (pair, backends):
            able = [b for b in some if b.has_room and b.number not in without]
            if able:
                return min(able, key=lambda backend: backend.load).number
        return None

    @staticmethod
    def _depth(matches: Sequence[tuple[int, int]], number: int) -> int:
        return next((depth for depth, mask in matches if mask >> number & 1), 0)


def _of_session(session: str, backends: Sequence[Loaded]) -> int:
    """The session's backend by rendezvous hashing: the same in each router, and another one only
    where that one is left out."""
    mark = mark_of(session)
    return max(backends, key=lambda backend: (backend.mark ^ mark) * _ODD & _MASK).number
