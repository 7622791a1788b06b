"""Numbers of adapters, by which llama.cpp's clients name them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence


class Numbers:
    """Numbers by name, from 0 on in the order in which names came. A name keeps its number. Clients
    that may use different names have numbers of their own, which tell nothing of others'.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, ...] | None, dict[str, int]] = {}
        """By the patterns of the names that a client may use."""

    def of(self, allowed: Sequence[str] | None, names: Iterable[str]) -> dict[str, int]:
        """The numbers of `names`, which are those of a client. `allowed`: patterns of the names
        that it may use; None: all."""
        key = None if allowed is None else tuple(allowed)
        with self._lock:
            known = self._known.setdefault(key, {})
            return {name: known.setdefault(name, len(known)) for name in names}
