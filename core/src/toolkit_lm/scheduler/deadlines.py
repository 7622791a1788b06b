"""Deadlines of requests."""

from __future__ import annotations

import heapq
import math


class Deadlines:
    """Finds the requests whose deadline has passed. A request that has ended before is returned
    too."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self.earliest = math.inf
        """Earliest time at which `passed` may return a request."""

    def add(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        self.earliest = self._heap[0][0]

    def passed(self, now: float) -> list[str]:
        """Returns the requests whose deadline has passed, each once."""
        request_ids = []
        while self._heap and self._heap[0][0] <= now:
            request_ids.append(heapq.heappop(self._heap)[1])
        self.earliest = self._heap[0][0] if self._heap else math.inf
        return request_ids
