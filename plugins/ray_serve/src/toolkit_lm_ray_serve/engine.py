"""A replica of Ray Serve's that is an engine."""

from __future__ import annotations

import logging
import os
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from toolkit_lm.config import VllmConfig
from toolkit_lm_server.hosting import HostedServer
from toolkit_lm_server.options import ServerOptions

FRONT = "front"
"""The deployment that hears of engines."""

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
        # The engine's process joins this cluster, and no other of the machine's.
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        self._config = VllmConfig.make(**engine)
        options = ServerOptions(**server, host=ray.util.get_node_ip_address(), port=0, ui=False)
        self._server = await HostedServer(self._config, options).__aenter__()
        self._front = serve.get_deployment_handle(FRONT)
        # Known before Ray Serve says that the app runs.
        await self._front.announce.remote(self._server.url)

    async def check_health(self) -> None:
        """Raises EngineDeadError where Ray Serve is to start another replica. It calls the method
        by this name, and so the front hears of the engine again and again."""
        self._server.check()
        self._server.metrics.queue_wait.num_elsewhere = await self._tell("announce")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The signals of load, which the policy reads. Ray Serve calls the method by this name."""
        metrics = self._server.metrics
        fill = metrics.fill(self._config.scheduler.max_num_seqs)
        return {"wait": metrics.queue_wait.seconds(), "fill": fill}

    async def __del__(self) -> None:
        """Ray Serve awaits it before the replica ends: requests under way finish, and no new ones
        come."""
        # Without a front, it has not started.
        if hasattr(self, "_front"):
            await self._tell("leave")
            await self._server.__aexit__()

    async def _tell(self, word: str) -> float:
        """Has all fronts do what `word` says, and returns the sum of their answers. There is no
        front where the whole app ends."""
        try:
            broadcast = self._front.broadcast(word, self._server.url)
            # Ray logs what a front raises, which hides no other's answer.
            answers = await broadcast.results_async(timeout_s=5.0, return_exceptions=True)
            return float(sum(answer for answer in answers if isinstance(answer, float)))
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("A front does not hear: %s", error)
            return 0.0
