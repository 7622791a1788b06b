"""A Ray cluster: how a process joins it, and gets room in it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from toolkit_lm.errors import EngineDeadError, UnsupportedError

from toolkit_lm_executor_ray import Options
from toolkit_lm_executor_ray.local import LocalCluster, check_address


class _Connection:
    """This process's connection to Ray, of which there can be one. Engines share it: the last one
    to leave ends it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_engines = 0
        self._local: LocalCluster | None = None

    def join(self, address: str) -> bool:
        """False: the host of the engine has connected it, and ends it. Raises EngineDeadError where
        the cluster is not reached."""
        with self._lock:
            if not self._num_engines:
                if ray.is_initialized():
                    return False
                try:
                    self._local = LocalCluster() if address == "local" else None
                    _connect(address, self._local)
                except BaseException:
                    self._end()
                    raise
            self._num_engines += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._num_engines -= 1
            if not self._num_engines:
                self._end()

    def _end(self) -> None:
        ray.shutdown()
        if self._local is not None:
            self._local.end()
            self._local = None


_connection = _Connection()


def _connect(address: str, local: LocalCluster | None) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    try:
        if local is None:
            ray.init(address, configure_logging=False, log_to_driver=False)
        else:
            with local.environment(), local.watched():
                ray.init(address, configure_logging=False, log_to_driver=False, **local.options)
            check_address()
    except (OSError, RuntimeError, ValueError) as error:
        raise EngineDeadError(
            f"the Ray cluster at executor_ray.address={address} is not reached: {error}. `ray "
            "start --head` starts one; "
            "address=local has the engine start one of its own."
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            # Signals are the host's.
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def joined(address: str) -> Iterator[None]:
    """Within it, this process is connected to Ray. Raises EngineDeadError."""
    is_ours = _connection.join(address)
    try:
        yield
    finally:
        if is_ours:
            _connection.leave()


@contextmanager
def placed(
    num_nodes: int, resources: dict[str, float], options: Options
) -> Iterator[PlacementGroup]:
    """Room for nodes that take `resources` each, by Ray's names. Raises UnsupportedError where
    there is none in time."""
    group = placement_group([resources] * num_nodes, strategy=options.strategy)
    try:
        if not group.wait(options.placement_timeout):
            raise UnsupportedError(_no_room(num_nodes, resources, options))
        yield group
    finally:
        if ray.is_initialized():
            remove_placement_group(group)


def _no_room(num_nodes: int, resources: dict[str, float], options: Options) -> str:
    def shown(found: dict[str, float]) -> str:
        return ", ".join(f"{found.get(name, 0):g} {name}" for name in resources)

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return (
        f"Ray had no room for {num_nodes} x {shown(resources)} (nodes x what the ranks of one "
        f"need; strategy {options.strategy}) within "
        f"{options.placement_timeout} s: its machines have {'; '.join(map(shown, machines))}, and "
        f"{shown(ray.available_resources())} are free. "
        "Give fewer ranks, fewer CPUs for each (executor_ray.cpus), other nodes or "
        "executor_ray.strategy, more machines, or more time "
        "(executor_ray.placement_timeout)."
    )
