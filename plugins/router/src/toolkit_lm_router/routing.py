"""A router in an event loop: what `toolkit route` serves, and a host's app may."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from toolkit_lm_router.app import Routed, create_app
from toolkit_lm_router.clients import RouterKeys, SharedKeys
from toolkit_lm_router.events import Followers
from toolkit_lm_router.fleet import Fleet
from toolkit_lm_router.metrics import RouterMetrics
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.proxy import Proxy
from toolkit_lm_router.upstream import Upstream, Watch

_SILENCE = 30.0
"""Seconds after which a backend that announced itself, and says nothing more, is forgotten where it
is not healthy. Until then it gets no requests."""
_LOOK = 0.05
"""Seconds from one look at the queue to the next: backends that rested may have room again."""


class Routing:
    """The backends, their watch, and the app that routes to them. Use it as a context."""

    def __init__(self, options: RouterOptions, name: str = "") -> None:
        """`name`: this router's, among several with the same backends, whose options are
        `options.shared_by`. Empty: there is no other."""
        self._options = options
        self._name = name
        self.fleet = Fleet(options, has_peers=bool(name))
        self._heard: dict[str, float] = {}
        """When each backend that announced itself was heard last, by URL."""
        self._ending = AsyncExitStack()

    async def __aenter__(self) -> Routing:
        options = self._options
        async with AsyncExitStack() as ending:
            upstream = await ending.enter_async_context(Upstream(options))
            keys = (SharedKeys if self._name else RouterKeys).of(options.server)
            self.proxy = Proxy(options, self.fleet, upstream, keys)
            self.metrics = RouterMetrics(self.fleet, lambda: len(self.proxy.queues), self._name)
            followers = None
            if options.kv_events:
                followers = Followers(self.fleet.policy.index)
                ending.callback(followers.close)
            self.watch = Watch(self.fleet, upstream, options.health_interval, followers)
            ending.push_async_callback(self.watch.close)
            own = create_app(options, self.fleet, self.proxy, self.metrics)
            self.app = Routed(self.proxy, own)
            self.fleet.tend = self.watch.tend
            self.watch.tend()
            looking = asyncio.create_task(self._look())
            ending.callback(looking.cancel)
            self._ending = ending.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ending.aclose()

    async def announce(self, url: str) -> float:
        """A backend says where it is, again and again. Returns the requests that wait in the router
        for each backend. One that an operator drains goes on draining."""
        now = self._heard[url] = time.monotonic()
        backend = self.fleet.backends.get(url) or self.fleet.add(url)
        for silent in [known for known, heard in self._heard.items() if now - heard > _SILENCE]:
            found = self.fleet.backends.get(silent)
            if found is None or not found.is_ready:
                self.leave(silent)
        if not backend.is_ready:
            await self.watch.check(backend)
        return len(self.proxy.queues) / max(self.fleet.num_ready(None), 1)

    def leave(self, url: str) -> None:
        """A backend that announced itself is to end: it gets no new requests. Those that it has go
        on."""
        self._heard.pop(url, None)
        if (backend := self.fleet.backends.get(url)) is not None:
            self.fleet.remove(backend)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            self.fleet.changed()
