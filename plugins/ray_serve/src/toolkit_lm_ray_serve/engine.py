"""A replica of Ray Serve's that is an engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.cli import engine_parts
from toolkit_lm_server.lifecycle import Lifecycle
from toolkit_lm_server.listening import bind, url_of
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.threads import close, in_thread

from toolkit_lm_ray_serve.scaling import Signals

FRONT = "front"
"""The deployment that hears of engines."""
BEAT = 1.0
"""Seconds from one word to the front to the next."""
_FAREWELL = 5.0
"""Seconds that the front may take to hear that an engine leaves."""

logger = logging.getLogger(__name__)


class Engine:
    """A server as that of `toolkit serve`, at an address of its own, which takes only the front's
    key.

    Requests come over HTTP, and not through Ray: a stream that breaks off goes on elsewhere, as
    behind `toolkit route`.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engine: dict[str, Any], server: dict[str, Any]
    ) -> None:
        """`engine`, `server`: options by name. Raises the ToolkitError that keeps the engine from
        starting."""
        options = ServerOptions(**server, host=ray.util.get_node_ip_address(), ui=False)
        config = VllmConfig.make(**engine)
        plugins = Plugins.load(config.plugins)
        self._signals = Signals(config.scheduler.max_num_seqs)
        plugins.add_listener("ray_serve", self._signals.event)
        make, make_app, metrics, threads, _ = engine_parts(config, options, plugins)
        listener = bind(options.host, 0)
        self._url = url_of(listener)
        self._making = in_thread(make)
        self._lifecycle = Lifecycle(self._making, make_app, options, metrics, listener, threads)
        self._serving = await self._lifecycle.start()
        application = serve.get_replica_context().app_name
        self._front = serve.get_deployment_handle(FRONT, application)
        # Known before Ray Serve says that the app runs.
        await self._tell()
        self._telling = asyncio.create_task(self._keep_telling())

    async def check_health(self) -> None:
        """Raises EngineDeadError where Ray Serve is to start another replica. It calls the method
        by this name."""
        if self._serving.done():
            self._serving.result()
            raise EngineDeadError("the engine's server has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The signals of load. Ray Serve calls the method by this name."""
        return self._signals.stats()

    async def __del__(self) -> None:
        """Ray Serve awaits it before the replica ends: requests under way finish, and no new ones
        come."""
        if not hasattr(self, "_telling"):
            # It has not started.
            return
        self._telling.cancel()
        with suppress(RayError, RayServeException, TimeoutError):
            # There is no front where the whole app ends.
            async with asyncio.timeout(_FAREWELL):
                await self._front.leave.remote(self._url)
        self._lifecycle.stop()
        with suppress(EngineDeadError):
            await self._serving
        await asyncio.wrap_future(close(self._making))

    async def _tell(self) -> None:
        self._signals.num_before = await self._front.announce.remote(self._url)

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            try:
                await self._tell()
            except (RayError, RayServeException, TimeoutError) as error:
                logger.warning("The front does not hear: %s", error)
