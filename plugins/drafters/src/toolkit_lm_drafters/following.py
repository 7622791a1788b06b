"""Following: whether a drafter that rests follows single tokens, or what that costs is too much."""

from __future__ import annotations

import time
from statistics import median

_SHARE = 0.005
"""Share of the time between steps that `follow` may take. Taps, and the step's arrays that are
prepared for it, cost about twice as much again."""
_FIRST = 8
"""Steps of a rest after which that is judged."""
_LATER = 64
"""The same, after a rest without following."""
_PAID = 300
"""Times what `follow` has taken before it is tried again: with the rest of its cost, 1%."""


class Following:
    """Measures what following takes. Where steps are short, a drafter stops, and tries again when
    a sequence is added and the time since has paid for it."""

    def __init__(self) -> None:
        self.is_on = True
        self._most = _FIRST
        self._wakes = 0.0
        self._last = 0.0
        self._took: list[float] = []
        self._between: list[float] = []

    def asked(self) -> None:
        """Drafts were asked for: the rest has ended."""
        self._took.clear()
        self._between.clear()
        self._last = 0.0

    def followed(self, begun: float) -> bool:
        """Records a step that was followed, since `begun` (perf_counter). Returns whether following
        ends with it."""
        now = time.perf_counter()
        if self._last:
            self._between.append(begun - self._last)
            self._took.append(now - begun)
        self._last = begun
        if len(self._took) < self._most:
            return False
        self.is_on = median(self._took) <= _SHARE * median(self._between)
        if not self.is_on:
            self._most = _LATER
            self._wakes = now + _PAID * sum(self._took)
        self.asked()
        return not self.is_on

    def added(self) -> None:
        """A sequence was added, whose prompt is followed."""
        self.is_on = self.is_on or time.perf_counter() >= self._wakes
