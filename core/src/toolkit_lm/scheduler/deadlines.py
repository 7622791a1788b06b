"""Deadlines of requests."""

from __future__ import annotations

import heapq
from collections.abc import Iterator


class Deadlines:
    """Which requests' time is over. One that has ended before is named all the same."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, deadline: float, request_id: str) -> None:
        heapq.heappush(self._heap, (deadline, request_id))

    def passed(self, now: float) -> Iterator[str]:
        """The requests whose deadline is over, each once."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[1]
