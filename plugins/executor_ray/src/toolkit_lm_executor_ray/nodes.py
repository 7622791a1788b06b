"""The nodes that Ray has placed, as the engine sees them."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import ExitStack
from typing import Any

import msgspec
import ray
import zmq
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, EngineDeadError
from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.network import Master
from toolkit_lm_executor_mp.nodes import Nodes

from toolkit_lm_executor_ray import Options
from toolkit_lm_executor_ray.actor import NodeActor
from toolkit_lm_executor_ray.cluster import joined, placed

_LOOK = 0.5
"""Seconds between two looks at whether the actors of nodes that have not come live."""
_LAST_WORDS = 2.0
"""Seconds that Ray may take to say what has become of an actor."""
_GRACE = 3.0
"""Seconds that the actors get to end by themselves."""


class RayNodes(Nodes):
    """Node 0 is the engine's process, and holds no rank. Each other node is an actor of Ray's."""

    runs = "Ray actor"

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], config: VllmConfig, options: Options
    ) -> None:
        """Raises ConfigError, EngineDeadError where Ray is not reached, UnsupportedError where it
        has no room."""
        _check(config)
        environment = _runtime_env(options)
        parallel = config.parallel
        self._of_process = os.getpid()
        self._next_poll = 0.0
        self._actors: list[Any] = []
        """Actors of the nodes. Ray ends an actor without a reference."""
        self._runs: list[Any] = []
        """Ray's references to the results of the actors, by node, from 1 on."""
        self._ray = ExitStack()
        try:
            self._ray.enter_context(joined(options.address))
            resources: dict[str, float] = {"CPU": options.cpus * parallel.ranks_per_node}
            if config.device.device.startswith("cuda"):
                resources["GPU"] = parallel.ranks_per_node
            group = self._ray.enter_context(placed(parallel.nodes, resources, options))
            master = (
                Master(ray.util.get_node_ip_address(), 0)
                if config.node.master is None
                else Master.parse(config.node.master)
            )
            key = secrets.token_bytes(wire.KEY_BYTES)
            super().__init__(context, config, master, key, range(0))
        except BaseException:
            self._ray.close()
            raise
        try:
            for number in range(parallel.nodes):
                self._actors.append(_actor(group, number, resources, environment))
                timeouts = (config.engine.start_timeout, config.node.node_timeout)
                threads = options.cpus * parallel.ranks_per_node
                run = self._actors[-1].run
                self._runs.append(
                    run.remote(
                        number + 1, self.master.host, self.master.port, key, timeouts, threads
                    )
                )
        except BaseException:
            self.close("")
            raise

    def find_death(self, doing: str) -> EngineDeadError | None:
        death = super().find_death(doing)
        if death is None and self.missing and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + _LOOK
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=0)
            for node in ended:
                number = self._runs.index(node) + 1
                ranks = ", ".join(map(str, self.ranks_of(number)))
                return EngineDeadError(
                    f"Ray could not start node {number}, of rank {ranks}: {_end_of(node)}"
                )
        elif death is not None and not hasattr(death, "__notes__"):
            # The node itself could not say why.
            ended, _ = ray.wait(self._runs, num_returns=1, timeout=_LAST_WORDS)
            for node in ended:
                death.add_note(f"Of node {self._runs.index(node) + 1}, Ray says: {_end_of(node)}")
        return death

    def close(self, reason: str) -> None:
        super().close(reason)
        # A fork of the engine leaves them alone.
        if os.getpid() == self._of_process:
            if self._runs and ray.is_initialized():
                ray.wait(self._runs, num_returns=len(self._runs), timeout=_GRACE)
            self._ray.close()


def _actor(
    group: PlacementGroup, bundle: int, resources: dict[str, float], environment: dict[str, Any]
) -> Any:
    """Has Ray start an actor in a bundle of the group. What a rank held is lost with it, so that
    Ray does not restart one alone."""
    where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    settings = {
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": where,
        "max_restarts": 0,
    }
    remote: Any = ray.remote(NodeActor)
    return remote.options(**settings, runtime_env=environment or None).remote()


def _end_of(run: Any) -> str:
    """The reason why an actor ended."""
    try:
        return str(ray.get(run, timeout=_LAST_WORDS)) or "it has ended."
    except RayError as error:
        return str(error)


def _check(config: VllmConfig) -> None:
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            "the executor 'ray' is for one engine: in place of data_parallel_size, Ray Serve has "
            "replicas."
        )
    if config.node.node_rank or config.node.launch_key_file is not None:
        raise ConfigError(
            "with the executor 'ray', Ray starts the nodes, with a key of their own: leave "
            "node_rank and launch_key_file out."
        )


def _runtime_env(options: Options) -> dict[str, Any]:
    runtime_env = options.runtime_env
    try:
        return (
            runtime_env
            if isinstance(runtime_env, dict)
            else msgspec.json.decode(runtime_env, type=dict[str, Any])
        )
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"executor_ray.runtime_env {runtime_env!r} is not a JSON object: {error}."
        ) from error
