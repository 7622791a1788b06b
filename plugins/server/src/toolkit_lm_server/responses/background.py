"""Responses that are made in the background, while no client waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from toolkit_lm_server.errors import RETRY_AFTER, ApiError

_MOST = 64
"""Most responses under way. Each holds its request."""


class Background:
    """The tasks that make responses. They end with the event loop. A client that leaves does not
    end them."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._work: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether this response is under way."""
        return name in self._work

    def start(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Starts the work on a response. `work` must not raise. Raises ApiError (429) where too
        many are under way."""
        if len(self._work) >= self._most:
            message = (
                f"{self._most} responses are made in the background. Try again later, or ask "
                "without background."
            )
            raise ApiError(
                429,
                message,
                param="background",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(RETRY_AFTER)},
            )
        task = self._work[name] = asyncio.create_task(work())
        task.add_done_callback(lambda _: self._work.pop(name, None))

    async def wait(self, name: str) -> None:
        """Waits until the work on a response has ended."""
        if (task := self._work.get(name)) is not None:
            await asyncio.wait([task])

    async def stop(self, name: str) -> None:
        """Ends the work on a response, and waits until it has ended."""
        if (task := self._work.get(name)) is not None:
            task.cancel()
            await asyncio.wait([task])
