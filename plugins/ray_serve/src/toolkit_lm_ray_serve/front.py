"""The replica of Ray Serve's that takes requests: the router, in front of engines."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp
from toolkit_lm_router.options import RouterOptions
from toolkit_lm_router.routing import Routing
from toolkit_lm_server.lifecycle import logged


class Front:
    """The app. Engines announce themselves, to each front where there are several."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engines: DeploymentHandle[Any], router: dict[str, Any], num_fronts: int
    ) -> None:
        """`engines`: makes Ray Serve start them. `router`: options by name."""
        self._options = RouterOptions(**router)
        name = serve.get_replica_context().replica_id.unique_id if num_fronts > 1 else ""
        self._routing = await Routing(self._options, name).__aenter__()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The app, for Ray Serve, which calls the method by this name."""
        return logged(self._routing.app, self._routing.metrics, self._options)

    async def announce(self, url: str) -> float:
        """An engine says where it is. Returns the requests that wait here for each engine."""
        return await self._routing.announce(url)

    async def leave(self, url: str) -> None:
        """An engine is to end: it gets no new requests. Those that it has go on."""
        self._routing.leave(url)
