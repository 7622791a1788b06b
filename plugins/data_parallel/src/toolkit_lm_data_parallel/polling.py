"""Waits for several engines at once."""

from __future__ import annotations

import math
import socket
from collections.abc import Collection, Sequence
from contextlib import suppress

import zmq

from toolkit_lm_data_parallel.engine import Engine

_LOOK = 1.0
"""Most seconds between two looks at engines that say nothing."""


class Polling:
    """Waits for messages of engines or a `wake`, whichever comes first."""

    def __init__(self) -> None:
        self._wake_send, self._wake_recv = socket.socketpair()
        self._wake_send.setblocking(False)
        self._wake_recv.setblocking(False)
        self._engines: Sequence[Engine] = ()
        self.watch(())

    def watch(self, engines: Sequence[Engine]) -> None:
        """From now on these, as far as they have processes: to be called whenever one has come or
        gone."""
        self._engines = engines
        self._poller = zmq.Poller()
        self._poller.register(self._wake_recv, zmq.POLLIN)
        self._sources: dict[object, Engine] = {}
        for engine in engines:
            for source in () if engine.client is None else engine.client.sources:
                self._poller.register(source, zmq.POLLIN)
                self._sources[source if isinstance(source, zmq.Socket) else source.fileno()] = (
                    engine
                )

    def wait(self, seconds: float) -> Collection[Engine] | None:
        """Engines with a message, and starting engines, which have a time limit. All engines after
        a while. None: a `wake` came."""
        ready = [
            source for source, _ in self._poller.poll(math.ceil(1000 * max(min(seconds, _LOOK), 0)))
        ]
        if self._wake_recv.fileno() in ready:
            self._wake_recv.recv(4096)
            return None
        if not ready:
            return self._engines
        found = [
            *(self._sources[source] for source in ready),
            *(engine for engine in self._engines if engine.info is None),
        ]
        return {engine.number: engine for engine in found}.values()

    def wake(self) -> None:
        """Lets a `wait` return, or else the next one. From any thread."""
        # A full pipe wakes as well, and a closed one has nobody to wake.
        with suppress(OSError):
            self._wake_send.send(b"\0")

    def close(self) -> None:
        self._wake_send.close()
        self._wake_recv.close()
