"""When the garbage collector of the server's process looks through everything: when there is little to look through."""

from __future__ import annotations

import gc
import time

_THRESHOLDS = (1_000, 10, 1_000)
"""New objects are looked at as often as by default, but all of them once there are ten million more."""
_INTERVAL = 1.0
"""Seconds from one look at how many there are to the next."""
_REST = 10.0
"""Seconds from one collection to the next look. Whoever asks meanwhile waits for it, so that one a second would be felt by one in fifty."""
_FEW = 30_000
"""Objects that are looked through in 20 ms. A call of 32,000 sequences has ten times as many while it lasts."""


class Garbage:
    """A full collection stops the process: 0.2 s beside large requests, and 2 ms where there are none."""

    def __init__(self) -> None:
        """What is there already stays, and is not looked at again."""
        gc.freeze()
        gc.set_threshold(*_THRESHOLDS)
        self._next = 0.0

    def tend(self) -> None:
        """Collects, now and then, where little is there. Call it often."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _INTERVAL
            if len(gc.get_objects(2)) <= _FEW:
                gc.collect()
                self._next = now + _REST
