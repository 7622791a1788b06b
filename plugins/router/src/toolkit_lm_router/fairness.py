"""The queue in front of backends that have no room: clients take turns."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Place = TypeVar("Place")

_QUANTUM = 16_384
"""Bytes of prompts that a client may send in its turn."""


class QueueFullError(Exception):
    """Too many requests wait."""


class _Waiting(Generic[Place]):
    """A request that waits."""

    def __init__(self, acquire: Callable[[], Place | None], cost: int, *, is_picky: bool) -> None:
        self.acquire = acquire
        self.cost = cost
        self.is_picky = is_picky
        self.is_in_line = True
        self.place: asyncio.Future[Place] = asyncio.get_running_loop().create_future()


class FairQueue(Generic[Place]):
    """Requests that wait for a place among the same backends. Clients are served by deficit round
    robin (Shreedhar and Varghese, 1995): each turn allows some bytes of prompts, and a request that
    is longer waits for several turns.

    So a client with many or long requests does not delay one with few.
    """

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, deque[_Waiting[Place]]] = OrderedDict()
        """The requests of each client that waits, the one whose turn it is first."""
        self._deficits: dict[Hashable, int] = {}
        """Bytes that a client may still send in its turn."""
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    async def wait(
        self,
        client: Hashable,
        acquire: Callable[[], Place | None],
        give_back: Callable[[Place], None],
        cost: int,
        *,
        is_picky: bool = False,
    ) -> Place:
        """A place, as `acquire` gives it; None of it means that there is none. `give_back`: for a
        place that comes when nobody waits for it any more. `cost`: bytes of the prompt. `is_picky`:
        the request cannot have every place."""
        waiting = _Waiting(acquire, cost, is_picky=is_picky)
        self._lines.setdefault(client, deque()).append(waiting)
        self._num_waiting += 1
        self.serve()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            if waiting.place.done() and not waiting.place.cancelled():
                give_back(waiting.place.result())
            raise
        finally:
            if waiting.is_in_line:
                self._leave(client, waiting)

    def serve(self) -> None:
        """Gives places to those that wait, in turn, until there is none."""
        num_skipped = 0
        while self._lines and num_skipped < len(self._lines):
            client = next(iter(self._lines))
            self._deficits.setdefault(client, _QUANTUM)
            if self._serve_turn(client):
                num_skipped = 0
                if client not in self._lines:
                    continue
                self._deficits[client] += _QUANTUM
            elif self._lines[client][0].is_picky:
                num_skipped += 1
            else:
                return
            self._lines.move_to_end(client)

    def _serve_turn(self, client: Hashable) -> bool:
        """Serves a client until its turn is over. False: there is no place for its first
        request."""
        line = self._lines[client]
        while line and line[0].cost <= self._deficits[client]:
            first = line[0]
            if not first.place.done():
                place = first.acquire()
                if place is None:
                    return False
                first.place.set_result(place)
                self._deficits[client] -= first.cost
            self._leave(client, first)
        return True

    def _leave(self, client: Hashable, waiting: _Waiting[Place]) -> None:
        line = self._lines[client]
        line.remove(waiting)
        waiting.is_in_line = False
        self._num_waiting -= 1
        if not line:
            # The rest of its turn is lost.
            del self._lines[client]
            self._deficits.pop(client, None)


class Queues(Generic[Place]):
    """A queue for each model."""

    def __init__(self, most: int, seconds: float) -> None:
        """`most`: requests that may wait in all. `seconds`: how long one may wait."""
        self._most = most
        self._seconds = seconds
        self._queues: dict[str | None, FairQueue[Place]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    async def place(
        self,
        model: str | None,
        client: Hashable,
        acquire: Callable[[], Place | None],
        give_back: Callable[[Place], None],
        cost: int,
        *,
        is_picky: bool = False,
    ) -> Place:
        """A place, at once where nobody waits. Raises QueueFullError, and TimeoutError."""
        queue = self._queues.get(model)
        if queue is None and (place := acquire()) is not None:
            return place
        if len(self) >= self._most:
            raise QueueFullError
        queue = self._queues.setdefault(model, FairQueue())
        try:
            async with asyncio.timeout(self._seconds):
                return await queue.wait(client, acquire, give_back, cost, is_picky=is_picky)
        finally:
            if not len(queue) and self._queues.get(model) is queue:
                del self._queues[model]

    def serve(self) -> None:
        """Gives places to those that wait. It is called when there may be some."""
        for queue in [*self._queues.values()]:
            queue.serve()
