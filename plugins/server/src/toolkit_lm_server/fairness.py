"""The scheduling policy "fair": what waits is served by turns between clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolkit_lm.scheduler.request import Request

CLIENT = "client"
"""The key of a request's context that says whose it is."""
_MANY = 10_000
"""Clients that are remembered."""


class FairPolicy:
    """Start-time fair queueing (Goyal, Vin and Cheng 1996), by tokens: one client's flood delays its own requests first.

    Each client has a clock, which a request of its own moves on by the tokens that it may compute. A request's key is where the clock
    stands. A clock that was left behind begins with the requests that are served now: nobody saves up turns.
    """

    def __init__(self) -> None:
        self._now = 0.0
        """The key of the latest request that has been served."""
        self._clocks: dict[str, float] = {}

    def __call__(self, request: Request) -> tuple[float, ...]:
        client = request.context.get(CLIENT, "")
        start = max(self._now, self._clocks.pop(client, 0.0))
        if len(self._clocks) >= _MANY:
            # Who has not come for the longest time.
            del self._clocks[next(iter(self._clocks))]
        self._clocks[client] = start + request.num_prompt_tokens + request.max_output_tokens * request.params.num_sequences
        return (start,)

    def started(self, request: Request) -> None:
        """It leaves the queue."""
        self._now = max(self._now, request.sort_key[0])
