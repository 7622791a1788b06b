"""Messages between the engine and the front. Importing it needs no torch."""

from __future__ import annotations

from msgspec import Struct, field

PART = "kv_disk"


class Counts(Struct):
    """Figures of a tier since the engine's start."""

    loads: dict[str, int] = field(default_factory=dict)
    """Loads by their end: loaded, failed, late, cancelled. slower: not begun, since computing was
    faster."""
    loaded_bytes: int = 0
    """Bytes that were loaded, of each rank."""
    load_seconds: float = 0.0
    """Seconds of the loads that have brought blocks."""
    stored_blocks: int = 0
    held_blocks: int = 0
    held_bytes: int = 0
    """Bytes that are held, of each rank."""


class Tiers(Struct):
    """Figures of an engine's tiers, by name."""

    tiers: dict[str, Counts]
