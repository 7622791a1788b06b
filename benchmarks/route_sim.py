"""Simulates the router's policy over 1 to 1,000 engines. No engine runs.

It shows the hit rate of prefixes, as routers expect it and as it is. It shows the memory of an
index, and the time of a decision.

usage: python benchmarks/route_sim.py [--engines 1 10 100 1000] [--requests 20000]
    [--routers 1] [--cache-chunks 6000] [--json]

The trace has sessions of several turns, each of which repeats the conversation so far. Each of some
applications, drawn by Zipf's law, has a shared system prompt. An engine has an LRU cache of
prefixes of its own, which may be smaller than what the router remembers. Requests under way are
about half of what the engines take.

`events`: engines tell routers what they store and evict, DELAY seconds later. Of several routers, a
random one gets each request, and each knows the loads of its own requests alone.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from toolkit_lm_router.policy import Choice, RoutingPolicy, Wanted, mark_of
from toolkit_lm_router.prefixes import CHUNK, Block, Hasher

APPS = 200
SYSTEM_CHUNKS = (2, 24)
TURN_CHUNKS = (1, 6)
TURNS = (1, 12)
ENGINE_CHUNKS = 6_000
"""Chunks in an engine's cache: 3 MB of text, 750,000 tokens."""
PER_ENGINE = 8
"""Requests under way of an engine, in the mean."""
ZIPF = 1.1
DELAY = 0.1
"""Seconds from a change of a cache to its events; a request takes about two."""


@dataclass(slots=True)
class Stub:
    number: int
    mark: int
    load: int = 0
    has_room: bool = True


@dataclass(slots=True)
class Row:
    """Results with one number of engines."""

    engines: int
    policy: str
    routers: int
    hit_share: float
    """Chunks of prompts that the engine's cache had, of all."""
    expected_share: float
    """Chunks that the router took for cached, of all."""
    wrong_share: float
    """Chunks by which it was wrong, either way, of all."""
    least_load: float
    most_load: float
    """Requests of the engine with the fewest and the most, divided by the mean."""
    decision_us: float
    digest_us: float
    index_mib: float
    """Memory of the index at the end."""


class Trace:
    """Prompts, as digests of their chunks."""

    def __init__(self, num_sessions: int, seed: int) -> None:
        self._random = random.Random(seed)  # nosec B311 # no secret
        self._apps = [
            [self._chunk() for _ in range(self._random.randint(*SYSTEM_CHUNKS))]
            for _ in range(APPS)
        ]
        self._weights = [1 / (rank + 1) ** ZIPF for rank in range(APPS)]
        self._open: list[tuple[str, list[bytes], int]] = []
        self._most = num_sessions
        self._count = 0

    def _chunk(self) -> bytes:
        return self._random.randbytes(CHUNK)

    def next(self) -> tuple[str, bytes]:
        """A session's name, and its prompt."""
        if len(self._open) < self._most:
            [app] = self._random.choices(self._apps, self._weights)
            self._count += 1
            session = f"s{self._count}", [*app], self._random.randint(*TURNS)
        else:
            session = self._open.pop(self._random.randrange(len(self._open)))
        name, chunks, left = session
        chunks += [self._chunk() for _ in range(self._random.randint(*TURN_CHUNKS))]
        prompt = b"".join(chunks)
        if left > 1:
            self._open.append((name, chunks, left - 1))
        return name, prompt


class Cache:
    """An engine's cache of prefixes."""

    def __init__(self, most: int) -> None:
        """`most`: chunks that it holds."""
        self._most = most
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def ask(self, digests: Sequence[int]) -> tuple[int, list[int]]:
        """Number of chunks that were cached, and the chunks that are evicted. All of the prompt's
        are cached afterwards."""
        hits = next((i for i, d in enumerate(digests) if d not in self._chunks), len(digests))
        for digest in reversed(digests):
            self._chunks[digest] = None
            self._chunks.move_to_end(digest)
        evicted = []
        while len(self._chunks) > self._most:
            evicted.append(self._chunks.popitem(last=False)[0])
        return hits, evicted


@dataclass(slots=True)
class Router:
    """A router, and the loads of engines that it knows of."""

    policy: RoutingPolicy
    stubs: list[Stub]
    by_number: dict[int, Stub] = field(init=False)
    total: int = 0

    def __post_init__(self) -> None:
        self.by_number = {stub.number: stub for stub in self.stubs}

    def choose(self, wanted: Wanted) -> Choice:
        """The engine of a request, which then has it."""
        allowed = (1 << len(self.stubs)) - 1
        choice = self.policy.choose(wanted, self.stubs, self.by_number, allowed, self.total)
        assert choice is not None
        self.policy.sent(wanted, choice.number)
        return choice

    def count(self, number: int, change: int) -> None:
        """A request begins, or ends."""
        self.by_number[number].load += change
        self.total += change

    def hear(self, number: int, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """An engine tells of its cache. Each chunk is a block."""
        for digest in evicted:
            self.policy.index.removed(number, Block(0, 0, digest))
        self.policy.index.stored(number, [(digest, Block(0, 0, digest)) for digest in stored])


@dataclass(slots=True)
class Counts:
    """Sums over a run."""

    hits: int = 0
    expected: int = 0
    wrong: int = 0
    chunks: int = 0
    seconds: float = 0.0
    hash_seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """One run's setting."""

    engines: int
    requests: int
    policy: str
    routers: int = 1
    cache_chunks: int = ENGINE_CHUNKS
    seed: int = 3

    def make_router(self, number: int) -> Router:
        drawing = random.Random(self.seed + number)  # nosec B311 # no secret
        policy = RoutingPolicy(
            follows_events=self.policy == "events", has_peers=self.routers > 1, random=drawing
        )
        stubs = [Stub(number, mark_of(str(number))) for number in range(self.engines)]
        return Router(policy, stubs)

    def wanted(self, digests: Sequence[int], session: str) -> Wanted:
        return {"load": Wanted(), "session": Wanted(digests, session)}.get(
            self.policy, Wanted(digests)
        )


def simulate(case: Case) -> Row:
    """One run."""
    engines = case.engines
    trace = Trace(num_sessions=engines * PER_ENGINE * 2, seed=case.seed)
    drawing = random.Random(case.seed)  # nosec B311 # no secret
    routers = [case.make_router(number) for number in range(case.routers)]
    caches = [Cache(case.cache_chunks) for _ in range(engines)]
    served = [0] * engines
    hasher = Hasher(b"simulation")
    ends: list[tuple[float, int, int]] = []
    news: deque[tuple[float, int, Sequence[int], Sequence[int]]] = deque()
    clock = 0.0
    counts = Counts()
    for _ in range(case.requests):
        clock += 1 / (engines * PER_ENGINE)
        while ends and ends[0][0] < clock:
            _, of_router, number = heapq.heappop(ends)
            routers[of_router].count(number, -1)
        while news and news[0][0] < clock:
            _, number, stored, evicted = news.popleft()
            for router in routers:
                router.hear(number, stored, evicted)
        session, prompt = trace.next()
        start = time.perf_counter()
        digests = hasher.digests([prompt])
        between = time.perf_counter()
        drawn = drawing.randrange(case.routers)
        choice = routers[drawn].choose(case.wanted(digests, session))
        counts.seconds += time.perf_counter() - between
        counts.hash_seconds += between - start
        number = choice.number
        hits, evicted = caches[number].ask(digests)
        counts.hits += hits
        counts.expected += choice.num_chunks
        counts.wrong += abs(choice.num_chunks - hits)
        counts.chunks += len(digests)
        served[number] += 1
        routers[drawn].count(number, 1)
        heapq.heappush(ends, (clock + 0.5 + len(digests) / 40, drawn, number))
        if case.policy == "events":
            news.append((clock + DELAY, number, digests, evicted))
    return row_of(case, counts, served, routers[0].policy)


def row_of(case: Case, counts: Counts, served: Sequence[int], policy: RoutingPolicy) -> Row:
    mean = case.requests / case.engines
    return Row(
        case.engines,
        case.policy,
        case.routers,
        counts.hits / counts.chunks,
        counts.expected / counts.chunks,
        counts.wrong / counts.chunks,
        min(served) / mean,
        max(served) / mean,
        counts.seconds / case.requests * 1e6,
        counts.hash_seconds / case.requests * 1e6,
        size_of(policy) / 2**20,
    )


def size_of(policy: RoutingPolicy) -> int:
    """Bytes of the policy's index: its dictionaries, their digests and their masks."""
    index = policy.index
    total = sys.getsizeof(index._backends)
    for digest, mask in index._backends.items():
        total += sys.getsizeof(digest) + sys.getsizeof(mask)
    return total + sum(sys.getsizeof(had.used) for had in index._had.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--cache-chunks", type=int, default=ENGINE_CHUNKS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        simulate(
            Case(
                engines,
                max(arguments.requests, 20 * engines),
                name,
                arguments.routers,
                arguments.cache_chunks,
            )
        )
        for engines in arguments.engines
        for name in ("load", "prefix", "session", "events")
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(
        "| engines | routed by | prefix hits | expected | wrong | load, least to most | decision "
        "| digests | index |"
    )
    print("| --- " * 9 + "|")
    for row in rows:
        print(
            f"| {row.engines:,} | {row.policy} | {row.hit_share:.3f} | {row.expected_share:.3f} | "
            f"{row.wrong_share:.3f} | {row.least_load:.2f} to {row.most_load:.2f} | "
            f"{row.decision_us:.0f} us | {row.digest_us:.0f} us | {row.index_mib:.1f} MiB |"
        )


if __name__ == "__main__":
    main()
