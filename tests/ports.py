"""Ports for tests that must name one before something listens there."""

from __future__ import annotations

import random
import socket

_FIRST = 20000
_LAST = 32000
"""Below the ports that the kernel gives out (32768 and up): no connection of another process takes
one of these meanwhile. Ray's own end at 19999."""
_given: set[int] = set()


def free_port(host: str = "127.0.0.1", count: int = 1) -> int:
    """A free port of `host`. The `count` - 1 after it are free too. It is given once only."""
    drawn = random.SystemRandom()
    for _ in range(1000):
        port = drawn.randrange(_FIRST, _LAST - count)
        ports = range(port, port + count)
        if _given.isdisjoint(ports) and all(is_free(host, number) for number in ports):
            _given.update(ports)
            return port
    raise AssertionError(f"no {count} ports of {host} are free")


def is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
