"""Health of an engine: whether it makes progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)

_LOOK = 1.0
"""Most seconds between two checks of a working engine."""


class Health(NamedTuple):
    """The state of an engine, with the reason for it."""

    status: Literal["starting", "ready", "stalled", "restarting", "dead", "closed"]
    """An idle engine is "ready". "stalled": there is work, but no step has ended within
    step_timeout seconds."""
    reason: str = ""
    """Reason for the status; empty when ready."""


class Watchdog:
    """A thread that watches an engine. It dumps the stacks of a stalled engine's threads, once per
    stall."""

    def __init__(
        self, seconds_since_progress: Callable[[], float], bound: float, dump: Callable[[], None]
    ) -> None:
        """`seconds_since_progress` returns the seconds since the last sign of life. More than
        `bound` is a stall."""
        self._seconds_since_progress = seconds_since_progress
        self._bound = bound
        self._dump = dump
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="toolkit_lm-watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stops the thread. May be called from any thread."""
        self._stopped.set()

    def _run(self) -> None:
        stalled = False
        while not self._stopped.wait(min(self._bound / 4, _LOOK)):
            before, stalled = stalled, self._seconds_since_progress() > self._bound
            if stalled and not before:
                logger.warning(
                    "the engine has made no progress for %.1f s (step_timeout): the stacks of "
                    "its threads follow",
                    self._bound,
                )
                self._dump()
            elif before and not stalled:
                logger.warning("the engine makes progress again")
