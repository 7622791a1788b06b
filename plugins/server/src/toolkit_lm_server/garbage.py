"""When the server's process looks through its garbage, and gives memory back to the system: when
there is little to do."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

_THRESHOLDS = (1_000, 10, 1_000)
"""New objects are looked at as often as by default, but all of them once there are ten million
more."""
_INTERVAL = 1.0
"""Seconds from one look at how many there are to the next."""
_REST = 10.0
"""Seconds from one collection to the next look. Whoever asks meanwhile waits for it, so that one a
second would be felt by one in fifty."""
_FEW = 30_000
"""Objects that are looked through in 20 ms. A call of 32,000 sequences has ten times as many while
it lasts."""
_GROWN = 1.05
"""Memory is given back where the process has so many times as much as after the last time."""


class Garbage:
    """A full collection stops the process: 0.2 s beside large requests, and 2 ms where there are
    none."""

    def __init__(self) -> None:
        """What is there already stays, and is not looked at again."""
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        self._next = 0.0
        self._trim = _trim()
        self._kept = resident_bytes()

    def tend(self, *, is_idle: bool = False) -> None:
        """Collects, now and then, where little is there. Call it often. `is_idle`: no request is
        under way."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            if len(gc.get_objects(2)) <= _FEW:
                gc.collect()
                self._next = now + _REST
                if is_idle and resident_bytes() > self._kept * _GROWN:
                    # The C library keeps what threads have freed: after a text of 4 MB was
                    # tokenized, some 200 MB.
                    self._trim(0)
                    self._kept = resident_bytes()


def _trim() -> Callable[[int], object]:
    """malloc_trim of the C library; where there is none, nothing."""
    with suppress(OSError, AttributeError):
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
        return found
    return lambda padding: None


def resident_bytes() -> int:
    """Bytes of memory that the process has."""
    return psutil.Process().memory_info().rss
