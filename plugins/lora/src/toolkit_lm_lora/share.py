"""What the halves of the part tell one another, as msgpack."""

from __future__ import annotations

from msgspec import Struct


class Use(Struct, array_like=True, frozen=True):
    """An adapter of a request."""

    digest: str
    scale: float
    name: str
    path: str
    start: int = 0
    """First token that it changes."""
    pinned: bool = False
    """Whether it stays in memory once it is read."""
    may_change_media: bool = False
    """Whether it may change embeddings of items of media."""


class Reading(Struct, frozen=True):
    """An adapter that workers are asked to read."""

    digest: str
    path: str
    pinned: bool = False


class Counts(Struct, frozen=True):
    """Counts of a worker, for metrics."""

    counts: bool
    """Whether it is the first of its engine's: others have done the same."""
    resident: dict[str, int]
    """By digest, bytes of each adapter in memory."""
    pinned: list[str]
    hits: int
    """Sequences that joined the batch while their adapter was in memory."""
    loads: int
    evictions: int
    load_seconds: float


class Order(Struct, array_like=True):
    """From the planner to the workers."""

    load: list[tuple[str, str, bool]]
    """(digest, path, pinned) of adapters to read, off the step's path."""
    activate: list[str]
    """Digests of adapters that rows may have from this step on."""
    deactivate: list[str]
    """Digests of adapters that no row has any more: they may be dropped."""


class Report(Struct, array_like=True):
    """From the last stage's first worker to the planner: all that it has."""

    held: dict[str, int]
    """By digest, bytes of the adapters that are in memory."""
    failed: dict[str, str]
    """By digest, why an adapter could not be read."""
    dropped: list[str]
    """Digests of adapters that have made room for others."""
    unwanted: list[str] = []
    """Digests of adapters to deactivate as soon as no request has them."""
