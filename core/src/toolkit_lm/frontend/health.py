"""Whether an engine gets on with its work."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple

logger = logging.getLogger(__name__)

_LOOK = 1.0
"""Most seconds between two looks at a working engine."""


class Health(NamedTuple):
    """The state of an engine, and what there is to say of it."""

    status: Literal["starting", "ready", "stalled", "restarting", "dead", "closed"]
    """An idle engine is "ready". "stalled": there is work, and no step has ended within
    step_timeout seconds."""
    reason: str = ""
    """Empty when ready."""


class Watchdog:
    """A thread that looks after an engine: one that stalls has the stacks of its threads dumped,
    once per stall."""

    def __init__(
        self, seconds_since_progress: Callable[[], float], bound: float, dump: Callable[[], None]
    ) -> None:
        """`seconds_since_progress`: for how many seconds there has been no sign of life. More than
        `bound` is a stall."""
        self._seconds_since_progress = seconds_since_progress
        self._bound = bound
        self._dump = dump
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="toolkit_lm-watchdog", daemon=True).start()

    def stop(self) -> None:
        """From any thread."""
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
