"""What carries news of requests from the engine's thread to the event loops of their callers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from toolkit_lm.outputs import PoolingRequestOutput, RequestOutput
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
        """Whether to wake the caller for this news of one request. In the engine's thread, once for
        each news."""
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
    """Requests that generate, as they go on. A slow caller gets what has come meanwhile as one
    output."""

    def __init__(self, *, final_only: bool) -> None:
        """`final_only`: of each request only the end is wanted."""
        super().__init__()
        self._final_only = final_only
        self._open: dict[int, AnyState] | None = None
        """By number, the requests that have not given their last output."""

    def wants(self, finished: bool) -> bool:
        return finished or not self._final_only

    @property
    def is_over(self) -> bool:
        """Every request has given its last output."""
        return self._open is not None and not self._open

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """What is new, each with its request's number, once there is anything. Outputs are made
        here, not in the engine's thread."""
        while True:
            await self._wait()
            if self._open is None:
                self._open = dict(enumerate(self.states))
            found = []
            for number, state in list(self._open.items()):
                with state.lock:
                    output = state.take()
                if isinstance(output, RequestOutput):
                    found.append((number, output))
                    if output.finished:
                        del self._open[number]
            if found:
                return found


class Batch(Listener):
    """Several pooling requests, which are wanted when all of them have ended: their caller is woken
    once."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._num_left = size

    def wants(self, finished: bool) -> bool:
        self._num_left -= finished
        return self._num_left == 0

    async def results(self) -> list[PoolingRequestOutput]:
        """In the order in which the requests were submitted."""
        await self._wait()
        return [
            output
            for state in self.states
            if isinstance(output := state.snapshot(), PoolingRequestOutput)
        ]
