"""A router in an event loop: what `toolkit route` serves, and a host's app may."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from toolkit_lm_router.app import create_app
from toolkit_lm_router.clients import RouterKeys
from toolkit_lm_router.fleet import Fleet
from toolkit_lm_router.metrics import RouterMetrics
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.proxy import Proxy
from toolkit_lm_router.upstream import Upstream, Watch

_LOOK = 0.05
"""Seconds from one look at the queue to the next: backends that rested may have room again."""


class Routing:
    """The backends, their watch, and the app that routes to them. Use it as a context."""

    def __init__(self, options: RouterOptions) -> None:
        self._options = options
        self.fleet = Fleet(options)
        self._ending = AsyncExitStack()

    async def __aenter__(self) -> Routing:
        options = self._options
        async with AsyncExitStack() as ending:
            upstream = await ending.enter_async_context(Upstream(options))
            self.proxy = Proxy(options, self.fleet, upstream, RouterKeys.of(options.server))
            self.metrics = RouterMetrics(self.fleet, lambda: len(self.proxy.queues))
            self.watch = Watch(self.fleet, upstream, options.health_interval)
            ending.push_async_callback(self.watch.close)
            self.app = create_app(options, self.fleet, self.proxy, self.metrics, self.watch.tend)
            self.watch.tend()
            looking = asyncio.create_task(self._look())
            ending.callback(looking.cancel)
            self._ending = ending.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ending.aclose()

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self.fleet.changed()
