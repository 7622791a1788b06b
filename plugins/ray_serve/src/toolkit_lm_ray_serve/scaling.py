"""How many engines the load needs: the signals of each, and the policy that reads them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from toolkit_lm.events import Event, LoadEvent, RequestEvent

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_WINDOW = 10.0
"""Most seconds over which the engine's pace is taken."""


class Signals:
    """The load of one engine, from its events."""

    def __init__(self, max_num_seqs: int) -> None:
        self.num_before = 0.0
        """Requests that wait in the front, for each engine."""
        self._max_num_seqs = max_num_seqs
        self._load = LoadEvent(
            time=0.0, num_running=0, num_waiting=0, num_used_blocks=0, num_total_blocks=0
        )
        self._num_started = 0
        self._since: float | None = None
        """Time since which requests wait; None: none does."""

    def event(self, event: Event) -> None:
        """Takes note of an event."""
        if isinstance(event, RequestEvent):
            self._num_started += event.kind == "scheduled"
        elif isinstance(event, LoadEvent):
            self._load = event

    def stats(self) -> dict[str, float]:
        """`wait`: estimated seconds until a new request is scheduled. `fill`: used part of the KV
        cache or of the batch's rows, whichever is fuller."""
        load = self._load
        blocks = load.num_used_blocks / max(load.num_total_blocks, 1)
        rows = min(load.num_running / self._max_num_seqs, 1.0)
        return {"wait": self._wait(load.num_waiting + self.num_before), "fill": max(blocks, rows)}

    def _wait(self, num_waiting: float) -> float:
        now = time.monotonic()
        if not num_waiting:
            self._since = None
            return 0.0
        if self._since is None:
            self._since = now
            self._num_started = 0
        elapsed = now - self._since
        wait = num_waiting * elapsed / (self._num_started + 1)
        if elapsed > _WINDOW:
            # Half of the window counts on: what was long ago does not.
            self._since = now - _WINDOW / 2
            self._num_started //= 2
        return wait


class Policy:
    """Number of engines that brings the wait and the fill down to their most: their mean, as a
    multiple of that, times the engines that there are. Ray Serve applies bounds and delays."""

    def __init__(self, max_wait: float, max_fill: float) -> None:
        self._most = {"wait": max_wait, "fill": max_fill}

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of engines, and the policy's state, of which it has none."""
        number = wanted(context.aggregated_metrics or {}, self._most, context.current_num_replicas)
        return number or context.target_num_replicas, {}


def wanted(
    metrics: Mapping[str, Mapping[Any, float]], most: Mapping[str, float], current: int
) -> int:
    """The number of engines that `metrics`, by name and engine, ask for. 0: they tell nothing."""
    shares = [
        sum(values.values()) / len(values) / most[name]
        for name in most
        if (values := metrics.get(name))
    ]
    if not shares or not current:
        return 0
    # A mean just above its most is noise.
    return max(math.ceil(max(shares) * current - 0.1), 1)
