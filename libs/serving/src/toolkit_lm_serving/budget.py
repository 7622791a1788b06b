"""What requests under way may cost, each and together, and what clients share of it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit_lm.errors import QueueFullError, RequestError

from toolkit_lm_serving.cost import Cost

_REQUESTS = 3
"""So many times the cost that one request may have is what all of them together may."""
_SHORT = 64
"""A queue of fewer requests is not shared."""


class Shares:
    """What clients share. Each may take seven eighths of what the others leave, so that who comes
    later finds some. Thread-safe."""

    def __init__(self, most: int | None) -> None:
        """None: there is no bound."""
        self._most = most
        self._taken: Counter[str] = Counter()
        """By client."""
        self._lock = threading.Lock()

    @property
    def taken(self) -> int:
        """By all of them."""
        with self._lock:
            return self._taken.total()

    @contextmanager
    def take(self, client: str, amount: int, told: Callable[[int], str]) -> Iterator[None]:
        """Raises QueueFullError where that is too much beside the others, RequestError where it is
        too much alone.

        `told`: formats an amount for the error.
        """
        if self._most is not None and amount > self._most * 7 // 8:
            raise RequestError(
                f"this takes {told(amount)}, and no client may take more than "
                f"{told(self._most * 7 // 8)}."
            )
        with self._lock:
            own = self._taken[client]
            taken = self._taken.total()
            if self._most is not None and own + amount > (self._most - (taken - own)) * 7 // 8:
                whose = f", {told(own)} of them this client's" if own < taken else ""
                raise QueueFullError(
                    f"the engine is busy: {told(taken)} are taken{whose}. This takes "
                    f"{told(amount)} more. Try again later.",
                    1.0,
                )
            self._taken[client] = own + amount
        try:
            yield
        finally:
            with self._lock:
                self._taken[client] -= amount
                if not self._taken[client]:
                    del self._taken[client]


class CostBudget:
    """What the requests under way may cost, each and together, and how many there may be.
    Thread-safe."""

    def __init__(self, most: int, max_queued: int | None = None) -> None:
        """`most`: bytes that one request may cost. `max_queued`: requests that may wait; a short
        queue is not shared."""
        self._most = most
        self._bytes = Shares(_REQUESTS * most)
        self._requests = Shares(None if max_queued is None or max_queued < _SHORT else max_queued)

    @property
    def num_requests(self) -> int:
        """Prompts and inputs that are under way or wait."""
        return self._requests.taken

    @contextmanager
    def spend(self, cost: Cost, client: str = "", num_requests: int = 1) -> Iterator[None]:
        """Raises RequestError for what is too much, QueueFullError for what is too much beside the
        others."""
        total = sum(cost.values())
        if total > self._most:
            largest = sorted(cost.items(), key=lambda item: -item[1])[:2]
            told = " and ".join(f"{name} ({_mib(size)})" for name, size in largest if size)
            limit = f"max_request_cost is {_mib(self._most)}"
            raise RequestError(
                f"the request could take {_mib(total)} of memory, most of it for {told}; {limit}."
            )
        requests = self._requests.take(client, num_requests, "{:,} requests".format)
        with requests, self._bytes.take(client, total, lambda size: f"{_mib(size)} of memory"):
            yield


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"
