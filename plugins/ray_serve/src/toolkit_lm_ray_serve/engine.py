"""A replica of Ray Serve's that is an engine."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from toolkit_lm import AsyncLLM
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import EngineDeadError
from toolkit_lm.plugin import Plugins
from toolkit_lm_server.app import create_app
from toolkit_lm_server.health import ALIVE, Readiness
from toolkit_lm_server.lifecycle import InFlight, KnownClient
from toolkit_lm_server.limits.connections import HttpServer
from toolkit_lm_server.listening import bind, url_of
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.request_log import RequestLog
from toolkit_lm_server.threads import SharedThreads

from toolkit_lm_ray_serve.scaling import Signals

FRONT = "front"
"""The deployment that hears of engines."""
BEAT = 1.0
"""Seconds from one word to the front to the next."""
_LOOK = 0.05
_FAREWELL = 5.0
"""Seconds that the front may take to hear that an engine leaves."""

logger = logging.getLogger(__name__)


class Engine:
    """An engine, and its server at an address of its own, which takes only the front's key.

    Requests come over HTTP, and not through Ray: a stream that breaks off goes on elsewhere, as
    behind `toolkit route`.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engine: dict[str, Any], server: dict[str, Any], key: str, drain_timeout: float
    ) -> None:
        """`engine`, `server`: options by name. Raises the ToolkitError that keeps the engine from
        starting."""
        self._ending = AsyncExitStack()
        self._drain_timeout = drain_timeout
        address = ray.util.get_node_ip_address()
        options = ServerOptions(**server, host=address, api_key=[key], ui=False)
        config = VllmConfig.make(**engine)
        if config.scheduler.scheduling_policy is None:
            config = config.replace(scheduling_policy="fair")
        plugins = Plugins.load(config.plugins)
        metrics = Metrics(model_name=config.served_model_name)
        self._signals = Signals(config.scheduler.max_num_seqs)
        plugins.add_listener(metrics.name, metrics.toolkit_event)
        plugins.add_listener("ray_serve", self._signals.event)
        asyncio.get_running_loop().set_default_executor(SharedThreads())
        self._llm = await asyncio.to_thread(partial(AsyncLLM, config, plugins=plugins))
        self._ending.push_async_callback(self._llm.aclose)
        self._readiness = Readiness(self._llm)
        app = create_app(self._llm, options, metrics=metrics, readiness=self._readiness)
        await self._ending.enter_async_context(app.router.lifespan_context(app))
        self._in_flight = InFlight(app)
        logged = RequestLog(self._in_flight, metrics, all_requests=options.access_log)
        listener = self._ending.enter_context(bind(address, 0))
        self._http = HttpServer(KnownClient(logged), options)
        self._serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        self._ending.push_async_callback(self._stop_serving)
        self._url = url_of(listener)
        application = serve.get_replica_context().app_name
        self._front = serve.get_deployment_handle(FRONT, application)
        # Known before Ray Serve says that the app runs.
        await self._tell()
        self._telling = asyncio.create_task(self._keep_telling())

    async def check_health(self) -> None:
        """Raises EngineDeadError where Ray Serve is to start another replica. It calls the method
        by this name."""
        health = self._llm.health()
        if health.status not in ALIVE or self._serving.done():
            raise EngineDeadError(f"the engine is {health.status}: {health.reason}")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The signals of load. Ray Serve calls the method by this name."""
        return self._signals.stats()

    async def __del__(self) -> None:
        """Ray Serve awaits it before the replica ends: requests under way finish, and no new ones
        come."""
        if hasattr(self, "_telling"):
            self._telling.cancel()
            with suppress(RayError, RayServeException, TimeoutError):
                # There is no front where the whole app ends.
                async with asyncio.timeout(_FAREWELL):
                    await self._front.leave.remote(self._url)
            self._readiness.draining = True
            with suppress(TimeoutError):
                async with asyncio.timeout(self._drain_timeout):
                    while self._in_flight.count or self._http.bounded.num_unread:
                        await asyncio.sleep(_LOOK)
        await self._ending.aclose()

    async def _stop_serving(self) -> None:
        self._http.bounded.abort()
        self._http.should_exit = True
        await self._serving

    async def _tell(self) -> None:
        self._signals.num_before = await self._front.announce.remote(self._url)

    async def _keep_telling(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            try:
                await self._tell()
            except (RayError, RayServeException, TimeoutError) as error:
                logger.warning("The front does not hear: %s", error)
