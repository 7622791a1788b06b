"""What carries news of requests from the engine's thread to the event loops of their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from toolkit_lm.outputs import PoolingRequestOutput
from toolkit_lm.processing.pooling_state import AnyState


class Listener:
    """One caller, who waits for one request or for several."""

    def __init__(self) -> None:
        """To be made in the caller's event loop."""
        self.loop = asyncio.get_running_loop()
        self.states: Sequence[AnyState] = ()
        """Set once, by the engine's thread, when the engine has the requests."""
        self.aborted: set[str] = set()
        """Requests asked to end before that. Touched by the engine's thread only."""
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def wants(self, finished: bool) -> bool:
        """Whether to wake the caller for this news of one request. In the engine's thread, once for each news."""
        return True

    def wake(self, error: BaseException | None = None) -> None:
        """There is something new, or nothing will come any more. In the caller's event loop."""
        self._error = self._error or error
        self._news.set()

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._error is not None:
            raise self._error


class Stream(Listener):
    """One request, as it goes on. A slow caller gets the newest state."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = 0

    async def next(self) -> Any:
        """The request's state once there is a new one. It is copied here, and not in the engine's thread."""
        while True:
            await self._wait()
            [state] = self.states
            with state.lock:
                if state.version != self._seen:
                    self._seen = state.version
                    return state.snapshot()


class Batch(Listener):
    """Several pooling requests, which are wanted when all of them have ended: their caller is woken once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._num_left = size

    def wants(self, finished: bool) -> bool:
        self._num_left -= finished
        return self._num_left == 0

    async def results(self) -> list[PoolingRequestOutput]:
        """In the order in which the requests were submitted."""
        await self._wait()
        return [output for state in self.states if isinstance(output := state.snapshot(), PoolingRequestOutput)]
