"""Messages between the engine and the front. Importing it needs no torch."""

from __future__ import annotations

from msgspec import Struct, field


class Counts(Struct):
    """Figures of a tier since the engine's start."""

    loads: dict[str, int] = field(default_factory=dict)
    """Loads by their end: loaded, failed, late, cancelled. slower: not begun, since computing was
    faster."""
    misses: dict[str, int] = field(default_factory=dict)
    """Requests whose prefix the tier could not make longer, by reason. absent: it has no block
    that comes next. off: it cannot be asked at present. border: each KV group has blocks, and no
    prefix ends where all have them. Else the kind of the KV group that lacks blocks."""
    loaded_bytes: int = 0
    """Bytes that were loaded, of each rank."""
    load_seconds: float = 0.0
    """Seconds of the loads that have brought blocks."""
    stored_blocks: int = 0
    withheld_blocks: int = 0
    """Blocks that were not given to the tier, since their prefix was seen once only."""
    held_blocks: int = 0
    held_bytes: int = 0
    """Bytes that are held, of each rank."""


class Tiers(Struct):
    """Figures of an engine's tiers, by name."""

    tiers: dict[str, Counts]


class Lost(Struct):
    """Blocks that the stores of a rank were given and could not keep, by tier."""

    tiers: dict[str, int]
