"""Messages between the front, the planner and the workers. Importing it needs no torch."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

PART = "kv_transfer"
PARAMS = "kv_transfer_params"
"""Field of requests and of answers."""
ARRAY = f"{PARAMS}.json"
"""Name of the array that brings this field into an answer."""
SHORT_BITS = 48
"""Bits of a digest that `remote_block_ids` has: JSON's numbers are exact up to 53."""


Content = tuple[int, bytes]
"""KV group and digest of a block."""


def short(digest: bytes) -> int:
    """The number of a block in `remote_block_ids`: the first bits of its digest."""
    return int.from_bytes(digest[: SHORT_BITS // 8], "big")


class Asked(Struct, frozen=True, array_like=True):
    """A request's wishes."""

    offers: bool = False
    """Its blocks are offered to peers."""
    fetches: list[list[int]] = []
    """Numbers of the blocks that a peer has, per KV group."""
    is_foreign: bool = False
    """It names a peer that is none of this engine's, and computes itself."""
    is_early: bool = False
    """A peer computes the prompt at the same time: all of its blocks are fetched as they come."""


class News(Struct, array_like=True):
    """A message of the planner to each rank's store."""

    begun: list[tuple[str, list[Content]]] = []
    """Requests that will offer blocks, and these."""
    ended: list[str] = []
    """Requests that will offer no more."""
    early: list[Content] = []
    """Blocks that a request is about to fetch, and that a peer may not know of yet."""


class Counts(Struct):
    """Figures of the scheduler's half since the engine's start."""

    offered_requests: int = 0
    """Requests whose blocks were offered."""
    fetching_requests: int = 0
    """Requests that came with blocks of a peer."""
    loads: dict[str, int] = field(default_factory=dict)
    """Loads by their end: loaded, failed, late, cancelled. foreign: not begun, since the peer is
    not on the list."""
    loaded_bytes: int = 0
    """Bytes that were loaded, of each rank."""
    load_seconds: float = 0.0


class RankCounts(Struct):
    """Figures of a rank since the engine's start."""

    held_blocks: int = 0
    held_bytes: int = 0
    """Blocks that wait for peers, and their bytes."""
    sent_blocks: int = 0
    sent_bytes: int = 0
    expired_blocks: int = 0
    """Blocks that no peer has fetched in time, or that had to make room."""
    fetched_blocks: int = 0
    fetched_bytes: int = 0
    shared_blocks: int = 0
    """Fetched blocks that were read from memory which the peer shares."""
    failures: dict[str, int] = field(default_factory=dict)
    """Blocks that did not come, by reason: unreachable, missing, late, damaged, foreign."""
    reachable_peers: int = 0


def added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """The sums of figures by name."""
    total: dict[str, int] = {}
    for each in counts:
        for name, number in each.items():
            total[name] = total.get(name, 0) + number
    return total
