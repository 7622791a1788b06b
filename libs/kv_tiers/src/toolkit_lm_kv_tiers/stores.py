"""Stores of this process that tell what they have lost. Needs no torch."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol
from weakref import WeakSet


class CountingStore(Protocol):
    """A worker's half of a tier, which counts what it could not keep."""

    tier: ClassVar[str]
    """Name of the tier."""
    options: Any
    """Options of its plugin, by which an engine's own stores are known."""
    num_lost: int
    """Blocks that it was given, and could not keep."""


_stores: WeakSet[Any] = WeakSet()


def remember(store: CountingStore) -> None:
    """Counts a store's losses among those of its process."""
    _stores.add(store)


def num_lost(options: Any) -> dict[str, int]:
    """Blocks that the stores with these options have lost, by tier."""
    found: dict[str, int] = {}
    for store in _stores:
        if store.options is options:
            found[store.tier] = found.get(store.tier, 0) + store.num_lost
    return found
