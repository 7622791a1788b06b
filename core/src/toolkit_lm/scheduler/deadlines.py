"""Deadlines of requests."""

from __future__ import annotations

import heapq
import math


class Deadlines:
    """Which requests' time is over. One that has ended before is named all the same."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self.earliest = math.inf
        """`passed` names nobody before."""

    def add(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        self.earliest = self._heap[0][0]

    def passed(self, now: float) -> list[str]:
        """The requests whose deadline is over, each once."""
        request_ids = []
        while self._heap and self._heap[0][0] <= now:
            request_ids.append(heapq.heappop(self._heap)[1])
        self.earliest = self._heap[0][0] if self._heap else math.inf
        return request_ids
