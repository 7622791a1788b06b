"""Deadlines of requests."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from toolkit_lm.scheduler.request import Request


class Deadlines:
    """Finds the requests whose deadline has passed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self.earliest = math.inf
        """Earliest time at which `passed` may yield a request."""

    def add(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        self.earliest = self._heap[0][0]

    def passed(self, now: float, known: Mapping[str, Request]) -> Iterator[Request]:
        """Yields those of `known`, by id, whose deadline has passed."""
        while self._heap and self._heap[0][0] <= now:
            request = known.get(heapq.heappop(self._heap)[1])
            # A new request may have reused the id of a finished one.
            if request is not None and request.deadline is not None and request.deadline <= now:
                yield request
        self.earliest = self._heap[0][0] if self._heap else math.inf
