"""Endpoints: addresses of the sockets that publish events."""

from __future__ import annotations

import ipaddress
import re
from typing import Any, NamedTuple

from toolkit_lm.config import VllmConfig

DEFAULT = "tcp://127.0.0.1:5557"
_TCP = re.compile(r"tcp://(?P<host>\*|\[[0-9A-Fa-f:]+\]|[A-Za-z0-9._-]+):(?P<port>[0-9]{1,5})")
_IPC = re.compile(r"ipc://(?P<path>[^\0]{1,100})")
_NAMES = ("kv_events", "toolkit_lm_kv_events")
"""Names of the plugin: installed, and given from code."""


class Endpoint(NamedTuple):
    """A ZeroMQ address."""

    base: str
    """Address without the port; of an ipc socket all of it."""
    port: int | None
    """0: a free one, where it is bound."""
    binds: bool
    """Subscribers connect to it. False: it is a subscriber's own address."""

    def of_rank(self, rank: int) -> str:
        """Returns the address of a data parallel rank: its port is `rank` higher, or 0, a free one.
        Raises ValueError if there is no such port."""
        if self.port is None:
            return self.base if rank == 0 else f"{self.base}_dp{rank}"
        if self.port == 0:
            return f"{self.base}:0"
        if (port := self.port + rank) > 65535:
            raise ValueError(
                f"{self.base}:{self.port} leaves no port for data parallel rank {rank}"
            )
        return f"{self.base}:{port}"


def parse(text: str) -> Endpoint:
    """Parses an address. Raises ValueError."""
    if found := _IPC.fullmatch(text):
        return Endpoint(text, None, True)
    found = _TCP.fullmatch(text)
    first = 0 if found and _is_own(found["host"]) else 1
    if found is None or not first <= int(found["port"]) <= 65535:
        raise ValueError(
            f"{text!r} is no address. Use tcp://HOST:PORT, with * for all interfaces, or "
            "ipc://PATH."
        )
    host = found["host"]
    return Endpoint(f"tcp://{host}", int(found["port"]), _is_own(host))


def _is_own(host: str) -> bool:
    """Whether a host means this machine, by its form."""
    if host in ("*", "localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def is_enabled(config: VllmConfig) -> bool:
    """Whether the plugin's options ask for events."""
    options: dict[str, Any] = {}
    for name in _NAMES:
        options |= config.plugins.plugin_option.get(name, {})
    return str(options.get("enabled", "")).lower() in ("true", "1", "on", "yes")
