"""The latest latencies, for the log's line of throughput."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

_MOST = 8192
"""Most values of each kind. Older ones are dropped where nobody reads them."""


class Recent:
    """Latencies since the last reading: seconds, each with the number of tokens that it is of."""

    def __init__(self) -> None:
        self.first: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """Times to first tokens."""
        self.between: deque[tuple[float, int]] = deque(maxlen=_MOST)
        """Times between tokens of a sequence."""

    def drain(self) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
        """The times to first tokens, and those between tokens. They are forgotten. Other threads
        may add some meanwhile."""
        return _drained(self.first), _drained(self.between)


def _drained(values: deque[tuple[float, int]]) -> list[tuple[float, int]]:
    return [values.popleft() for _ in range(len(values))]


def percentile(values: Iterable[tuple[float, int]], percent: float) -> float | None:
    """The smallest value that `percent` of all are not above: nearest rank. `values`: each with
    its count. None where there are none."""
    ordered = sorted(values)
    left = percent / 100 * sum(count for _, count in ordered)
    for value, count in ordered:
        left -= count
        if left <= 0:
            return value
    return ordered[-1][0] if ordered else None
