"""The replica of Ray Serve's that takes requests: the router, in front of engines."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Receive, Scope, Send
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.routing import Routing
from toolkit_lm_server.lifecycle import KnownClient
from toolkit_lm_server.request_log import RequestLog

from toolkit_lm_ray_serve.engine import BEAT

_SILENCE = 30 * BEAT
"""Seconds after which an engine that says nothing is forgotten. It gets no requests before, where
it does not answer."""


class Front:
    """The app. Engines announce themselves."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engines: DeploymentHandle[Any], router: dict[str, Any]
    ) -> None:
        """`engines`: makes Ray Serve start them. `router`: options by name."""
        self._options = RouterOptions(**router)
        self._heard: dict[str, float] = {}
        """When each engine was heard last, by URL."""
        self._routing = Routing(self._options)
        await self._routing.__aenter__()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app, for Ray Serve, which calls the method by this name."""
        routing = self._routing
        logged = RequestLog(routing.app, routing.metrics, all_requests=self._options.access_log)
        known = KnownClient(logged)

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            # The lifespan is no request.
            await (known if scope["type"] == "http" else routing.app)(scope, receive, send)

        return app

    async def announce(self, url: str) -> float:
        """An engine says where it is. Returns the requests that wait here for each engine."""
        fleet = self._routing.fleet
        now = self._heard[url] = time.monotonic()
        backend = fleet.add(url)
        for silent in [known for known, heard in self._heard.items() if now - heard > _SILENCE]:
            self._forget(silent)
        self._routing.watch.tend()
        if not backend.is_ready:
            await self._routing.watch.check(backend)
        return len(self._routing.proxy.queues) / max(fleet.num_ready(None), 1)

    async def leave(self, url: str) -> None:
        """An engine is to end: it gets no new requests. Those that it has go on."""
        self._forget(url)
        self._routing.watch.tend()

    def _forget(self, url: str) -> None:
        self._heard.pop(url, None)
        if (backend := self._routing.fleet.backends.get(url)) is not None:
            self._routing.fleet.remove(backend)
