"""The wait of a new request, estimated."""

from __future__ import annotations

import time

_WINDOW = 10.0
"""Most seconds over which the engine's pace is taken."""


class QueueWait:
    """Seconds until a new request gets a place in the batch: the requests before it, divided by the
    pace at which requests began since some wait."""

    def __init__(self) -> None:
        self.num_elsewhere = 0.0
        """Requests that wait for this engine outside of it, such as in a router."""
        self._num_waiting = 0
        self._num_begun = 0
        self._since: float | None = None
        """Time since which requests wait; None: none does."""

    def begun(self) -> None:
        """A request has got its place in the batch."""
        self._num_begun += 1

    def waiting(self, number: int) -> None:
        """Number of requests that wait in the engine now."""
        self._num_waiting = number
        # The wait begins and ends here, and not when somebody asks for it.
        self.seconds()

    def seconds(self) -> float:
        """The estimate. 0 where no request waits."""
        now = time.monotonic()
        num_waiting = self._num_waiting + self.num_elsewhere
        if not num_waiting:
            self._since = None
            return 0.0
        since = self._since
        if since is None:
            since = self._since = now
            self._num_begun = 0
        elapsed = now - since
        wait = num_waiting * elapsed / (self._num_begun + 1)
        if elapsed > _WINDOW:
            # Half of the window counts on: what was long ago does not.
            self._since = now - _WINDOW / 2
            self._num_begun //= 2
        return wait
