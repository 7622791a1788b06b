"""The garbage collector of the server's process. It collects, and gives memory back to the system,
while there is little to do."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

_THRESHOLDS = (1_000, 10, 1_000)
"""Thresholds of gc. Young objects are looked at as often as by default, and all objects once ten
million more exist."""
_INTERVAL = 1.0
"""Seconds from one count of the objects to the next."""
_REST = 10.0
"""Seconds from one collection to the next count. Requests wait for a collection: at one a second,
one request in fifty would feel it."""
_FEW = 30_000
"""Objects that a collection looks through in 20 ms. A call of 32,000 sequences has ten times as
many while it lasts."""
_GROWN = 1.05
"""Growth of the process's memory, since memory was last given back, at which it is given back
again."""


class Garbage:
    """Collects garbage between requests. A full collection stops the process: 0.2 s beside large
    requests, and 2 ms without any."""

    def __init__(self) -> None:
        """Freezes the objects that exist already, so that no collection looks at them."""
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        self._next = 0.0
        self._trim = _trim()
        self._kept = resident_bytes()

    def tend(self, *, is_idle: bool = False) -> None:
        """Collects now and then, when few objects exist. Call it often. `is_idle`: no request is
        under way."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            if _num_old() <= _FEW:
                gc.collect()
                self._next = now + _REST
                if is_idle and resident_bytes() > self._kept * _GROWN:
                    # The C library keeps what threads have freed: after a text of 4 MB was
                    # tokenized, some 200 MB.
                    self._trim(0)
                    self._kept = resident_bytes()


def _num_old() -> int:
    """Objects of the oldest generation.

    `gc.get_objects` refers to tuples that other threads are making at that time, and those cannot
    grow then: `tuple(generator)` fails with SystemError. So the list is gone before another thread
    runs: all of this is one call into C.
    """
    return next(map(len, map(gc.get_objects, (2,))))


def _trim() -> Callable[[int], object]:
    """The C library's malloc_trim. A function without effect where the library has none."""
    with suppress(OSError, AttributeError):
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        return found
    return lambda padding: None


def resident_bytes() -> int:
    """Bytes of memory that the process holds."""
    return psutil.Process().memory_info().rss
