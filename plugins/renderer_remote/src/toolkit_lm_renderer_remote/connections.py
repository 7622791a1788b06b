"""LoopConnections: connections of event loops to render servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx


class _Own(NamedTuple):
    """Client and slots of one event loop."""

    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    """Who waits for a connection waits here, and not against a server's timeout."""
    lifetime: AsyncGenerator[httpx.AsyncClient, None]


class LoopConnections:
    """Each event loop that asks has connections of its own, kept until it ends: a connection
    belongs to the loop that made it.

    They are held by an asynchronous generator, which a loop closes at its end
    (`shutdown_asyncgens`, as `asyncio.run` does).
    """

    def __init__(self, most: int, options: Mapping[str, Any]) -> None:
        """`most`: requests of a loop at a time. `options`: those of httpx.AsyncClient."""
        self._most = most
        self._options = options
        self._by_loop: dict[asyncio.AbstractEventLoop, _Own] = {}

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        """A client of the running loop, for one request at a time."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for ended in [loop for loop in list(self._by_loop) if loop.is_closed()]:
                self._by_loop.pop(ended, None)
            lifetime = self._lifetime(loop)
            self._by_loop[loop] = _Own(
                await anext(lifetime), asyncio.Semaphore(self._most), lifetime
            )
        own = self._by_loop[loop]
        async with own.slots:
            yield own.client

    async def _lifetime(
        self, loop: asyncio.AbstractEventLoop
    ) -> AsyncGenerator[httpx.AsyncClient, None]:
        client = httpx.AsyncClient(**self._options)
        try:
            yield client
        finally:
            self._by_loop.pop(loop, None)
            await client.aclose()
