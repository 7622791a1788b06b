"""Simulates the router's policy over 1 to 1,000 engines: hit rate of prefixes, memory of its index,
and time of a decision. No engine runs.

usage: python benchmarks/route_sim.py [--engines 1 10 100 1000] [--requests 20000] [--json]

The trace: sessions of several turns, each of which repeats the conversation so far; a shared system
prompt for each of some applications, drawn by Zipf's law. An engine has an LRU cache of prefixes of
its own, which may be smaller than what the router remembers. Requests under way are about half of
what the engines take.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
from collections import OrderedDict
from dataclasses import asdict, dataclass

from toolkit_lm_router.policy import RoutingPolicy, Wanted
from toolkit_lm_router.prefixes import CHUNK, Hasher

APPS = 200
SYSTEM_CHUNKS = (2, 24)
TURN_CHUNKS = (1, 6)
TURNS = (1, 12)
ENGINE_CHUNKS = 6_000
"""Chunks in an engine's cache: 3 MB of text, 750,000 tokens."""
PER_ENGINE = 8
"""Requests under way of an engine, in the mean."""
ZIPF = 1.1


@dataclass(slots=True)
class Stub:
    number: int
    load: int = 0
    has_room: bool = True


@dataclass(slots=True)
class Row:
    """Results with one number of engines."""

    engines: int
    policy: str
    hit_share: float
    """Chunks of prompts that the engine's cache had, of all."""
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

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def ask(self, digests: list[int]) -> int:
        """Number of chunks that were cached. All are, afterwards."""
        hits = next((i for i, d in enumerate(digests) if d not in self._chunks), len(digests))
        for digest in reversed(digests):
            self._chunks[digest] = None
            self._chunks.move_to_end(digest)
        while len(self._chunks) > ENGINE_CHUNKS:
            self._chunks.popitem(last=False)
        return hits


def simulate(engines: int, requests: int, policy_name: str, seed: int = 3) -> Row:
    """One run."""
    trace = Trace(num_sessions=engines * PER_ENGINE * 2, seed=seed)
    stubs = [Stub(number) for number in range(engines)]
    by_number = {stub.number: stub for stub in stubs}
    allowed = (1 << engines) - 1
    caches = [Cache() for _ in stubs]
    served = [0] * engines
    hasher = Hasher(b"simulation")
    policy = RoutingPolicy(random=random.Random(seed))  # nosec B311 # no secret
    ends: list[tuple[float, int]] = []
    clock = spent = hashed = 0.0
    hits = chunks = total = 0
    for _ in range(requests):
        clock += 1 / (engines * PER_ENGINE)
        while ends and ends[0][0] < clock:
            by_number[heapq.heappop(ends)[1]].load -= 1
            total -= 1
        session, prompt = trace.next()
        start = time.perf_counter()
        digests = hasher.digests([prompt])
        between = time.perf_counter()
        wanted = {
            "prefix": Wanted(digests),
            "session": Wanted(digests, session),
            "load": Wanted(),
        }[policy_name]
        choice = policy.choose(wanted, stubs, by_number, allowed, total)
        assert choice is not None
        policy.sent(wanted, choice.number)
        spent += time.perf_counter() - between
        hashed += between - start
        hits += caches[choice.number].ask(digests)
        chunks += len(digests)
        served[choice.number] += 1
        by_number[choice.number].load += 1
        total += 1
        heapq.heappush(ends, (clock + 0.5 + len(digests) / 40, choice.number))
    mean = requests / engines
    return Row(
        engines,
        policy_name,
        hits / chunks,
        min(served) / mean,
        max(served) / mean,
        spent / requests * 1e6,
        hashed / requests * 1e6,
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
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [
        simulate(engines, max(arguments.requests, 20 * engines), name)
        for engines in arguments.engines
        for name in ("load", "prefix", "session")
    ]
    if arguments.json:
        print(json.dumps([asdict(row) for row in rows], indent=1))
        return
    print(
        "| engines | routed by | prefix hits | load, least to most | decision | digests | index |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.engines:,} | {row.policy} | {row.hit_share:.2f} | {row.least_load:.2f} to "
            f"{row.most_load:.2f} | {row.decision_us:.0f} us | {row.digest_us:.0f} us | "
            f"{row.index_mib:.1f} MiB |"
        )


if __name__ == "__main__":
    main()
