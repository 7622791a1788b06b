"""A private Ray cluster, which only this engine reaches and which ends with it."""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from toolkit_lm.errors import EngineDeadError

from toolkit_lm_executor_ray.guard import VARIABLE, descendants, is_rays

_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Makes Ray's processes listen on the loopback interface only, on any system. Ray has no other
setting for it; this one is meant for desktop firewalls."""


class LocalCluster:
    """Its processes have a variable in their environment, by which those that Ray leaves behind are
    found, and ended."""

    def __init__(self) -> None:
        """Raises EngineDeadError where its folder cannot be made."""
        self._mark = secrets.token_hex(16)
        # A new folder of mode 0700, where Ray's own are: the paths of its sockets have room for no
        # longer one.
        self._folder = _make_folder(os.environ.get("RAY_TMPDIR") or "/tmp")  # nosec B108
        """Folder of its sockets and logs. Other users cannot enter it, whatever permissions Ray's
        folders within have. The guard removes it."""
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Options of ray.init. We put nothing into the object store."""
        return {
            "include_dashboard": False,
            "object_store_memory": 100 * 2**20,
            "_temp_dir": f"{self._folder}/r",
        }

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Environment of its processes: a token that no file holds, which every caller must
        present. Usage reports to Ray's makers are off."""
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        set_here = {**_LOOPBACK, **token, VARIABLE: self._mark, "RAY_USAGE_STATS_ENABLED": "0"}
        before = {name: os.environ.get(name) for name in set_here}
        is_cluster, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
        os.environ.update(set_here)
        _reload()
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = is_cluster
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Processes that Ray starts in this context end with this process, however it ends. Other
        threads may start processes of their own."""
        others = set(psutil.Process().children())
        code = (
            f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from "
            "toolkit_lm_executor_ray.guard import main; main()"
        )
        # Without a shell, and without a word of a client's.
        self._guard = subprocess.Popen(  # nosec B603
            [sys.executable, "-c", code, self._mark, self._folder],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != VARIABLE},
        )
        yield
        assert self._guard.stdin is not None, "it was asked for"
        started = [
            child for child in psutil.Process().children() if child not in others and is_rays(child)
        ]
        family = {member for process in started for member in [process, *descendants(process)]}
        self._guard.stdin.write("".join(f"{member.pid}\n" for member in family).encode())
        self._guard.stdin.flush()

    def end(self) -> None:
        """Waits until all its processes have ended. Ray was asked to end them before."""
        _reload()
        guard, self._guard = self._guard, None
        if guard is not None and guard.stdin is not None:
            guard.stdin.close()
            guard.wait()


def _make_folder(parent: str) -> str:
    try:
        os.makedirs(parent, exist_ok=True)
        return tempfile.mkdtemp(prefix="ray-", dir=parent)
    except OSError as error:
        raise EngineDeadError(
            f"the folder of the local Ray cluster cannot be made in {parent!r}: "
            f"{error.strerror}. Set RAY_TMPDIR to another."
        ) from error


def _reload() -> None:
    """Has Ray read in this process what the environment says of tokens."""
    compiled: Any = ray._raylet
    compiled.Config.initialize("")
    compiled.AuthenticationTokenLoader.instance().reset_cache()


def check_address() -> None:
    """Raises EngineDeadError where the cluster listens to a network."""
    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        raise EngineDeadError(
            f"a local Ray cluster listens at {address}, which others may reach: this version of "
            f"Ray ({ray.__version__}) does not stay on "
            "the loopback interface. Give executor_ray.address another cluster."
        )
