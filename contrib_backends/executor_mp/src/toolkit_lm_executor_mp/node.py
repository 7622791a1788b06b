"""A node without an engine: it starts its ranks' workers, and forwards their messages and the
engine's."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import zmq
from toolkit_lm.config import NodeConfig
from toolkit_lm.errors import ConfigError, EngineDeadError

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.local import LocalWorkers, receive_all
from toolkit_lm_executor_mp.network import Master, endpoint, make_socket, read_key, versions

_LOOK = 1.0
"""Seconds between two checks that the workers live."""
_LINGER = 1000
"""Milliseconds that the last message gets to be sent."""
_MOST_REFUSALS = 5
"""Connections that the master closes without an answer before the node gives up."""


def make_node(config: NodeConfig, start_timeout: float) -> Node:
    """Makes the node that the options describe. Raises ConfigError."""
    if not config.node_rank:
        raise ConfigError(
            "node 0 holds the engine: run `toolkit serve MODEL --nodes N --master HOST:PORT` "
            "there. A worker needs --node-rank 1 or higher."
        )
    return Node(
        config.node_rank,
        Master.parse(config.master),
        read_key(config),
        start_timeout,
        config.node_timeout,
    )


class Node:
    """A node of a launch, from its start to the end of the engine.

    It forwards messages without decoding them. The engine sends all that the node needs of the
    config.
    """

    def __init__(
        self, rank: int, master: Master, key: bytes, start_timeout: float, node_timeout: float
    ) -> None:
        """Opens the sockets.

        `rank`: the node's number, from 1 on. `key`: 32 bytes. `start_timeout`: seconds until node 0
        must be there. `node_timeout`: seconds without a heartbeat after which node 0 counts as
        lost.
        """
        self.rank = rank
        self._master = master
        self._key = key
        self._timeout = start_timeout
        self._end = time.monotonic() + start_timeout
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._door = make_socket(
            self._context, zmq.DEALER, self._key, node_timeout, is_master=False
        )
        self._losses = self._door.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._plans = make_socket(self._context, zmq.PULL, self._key, node_timeout, is_master=False)
        self._workers: LocalWorkers | None = None
        self._wake_recv, self._wake_send = socket.socketpair()
        self._signal: int | None = None

    def run(self, joined: Callable[[wire.Welcome], None] = lambda _: None) -> None:
        """Runs until the engine ends normally. `joined` is called once the engine has accepted the
        node.

        Raises EngineDeadError if the engine, a worker or the connection fails. Raises ConfigError
        if the engine refuses the node.
        """
        self._handle_signals()
        try:
            address = self._resolve()
            self._door.connect(endpoint(address, self._master.port))
            welcome = self._greet()
            self._plans.connect(endpoint(address, welcome.plans_port))
            self._workers = LocalWorkers(self._context, welcome.ranks, address)
            joined(welcome)
            self._pass_on(self._workers)
        except (EngineDeadError, OSError) as error:
            self._say(wire.NodeFailed(str(error), list(getattr(error, "__notes__", ()))))
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Ends the workers. Safe to call twice."""
        if self._context.closed:
            return
        if self._workers is not None:
            self._workers.close()
        self._door.disable_monitor()
        self._losses.close(linger=0)
        self._door.close(linger=_LINGER)
        self._plans.close(linger=0)
        self._context.term()
        self._wake_send.close()
        self._wake_recv.close()

    def _handle_signals(self) -> None:
        def note(number: int, _: object) -> None:
            self._signal = number
            with suppress(OSError):
                self._wake_send.send(b"\0")

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)

    def _resolve(self) -> str:
        """The master's IP address. Waits for a name that cannot be resolved yet."""
        while True:
            try:
                return self._master.resolve()
            except OSError as error:
                self._check_end(f"the name has no address: {error}")
            self._wait(time.monotonic() + 0.5, [])

    def _check_end(self, why: str) -> None:
        if time.monotonic() >= self._end:
            raise EngineDeadError(
                f"node {self.rank} could not reach node 0 at {self._master} within "
                f"{self._timeout:g} s: {why}."
            )

    def _wait(self, end: float, sockets: list[Any]) -> None:
        """Waits until a socket can be read, or until `end` of time.monotonic(). Raises
        EngineDeadError for a signal."""
        poller = zmq.Poller()
        for source in (*sockets, self._wake_recv):
            poller.register(source, zmq.POLLIN)
        poller.poll(math.ceil(1000 * max(0.0, end - time.monotonic())))
        if self._signal is not None:
            raise EngineDeadError(
                f"node {self.rank} was told to end by {signal.Signals(self._signal).name}."
            )

    def _say(self, report: wire.Report) -> None:
        # An empty frame sets it apart from what is passed on.
        with suppress(zmq.ZMQError):
            self._door.send_multipart([b"", wire.encode(report)], zmq.NOBLOCK)

    def _greet(self) -> wire.Welcome:
        """Authenticates the node to the engine, and the engine to the node."""
        nonce = os.urandom(wire.KEY_BYTES)
        refusals = 0
        proven = False
        hello = wire.NodeHello(self.rank, nonce, socket.gethostname(), os.getpid(), versions())
        self._say(hello)
        while True:
            self._wait(min(self._end, time.monotonic() + _LOOK), [self._door, self._losses])
            for frame in receive_all(self._door):
                command = wire.decode_command(frame.buffer) if len(frame) else None
                if isinstance(command, wire.Challenge):
                    if not secrets.compare_digest(
                        command.proof, wire.prove(self._key, "engine", self.rank, nonce)
                    ):
                        raise EngineDeadError(
                            f"who answers at {self._master} does not know the key of the launch."
                        )
                    proven = True
                    self._say(
                        wire.NodeProof(wire.prove(self._key, "node", self.rank, command.nonce))
                    )
                elif isinstance(command, wire.Welcome) and proven:
                    return command
                elif isinstance(command, wire.Farewell):
                    self._end_with(command)
            if self._is_lost():
                refusals += 1
                if refusals >= _MOST_REFUSALS:
                    raise EngineDeadError(
                        f"who listens at {self._master} closes the connection: it has another "
                        "launch key, or is no node 0 of this version."
                    )
                # It went with the connection.
                self._say(hello)
            self._check_end("nobody answers there")

    def _is_lost(self) -> bool:
        """Whether the connection has ended since the last call."""
        is_lost = False
        while self._losses.poll(0):
            self._losses.recv_multipart()
            is_lost = True
        return is_lost

    def _end_with(self, farewell: wire.Farewell) -> NoReturn:
        raise EngineDeadError(
            f"node 0 at {self._master} has ended: {farewell.reason or 'it has been shut down'}"
        )

    def _pass_on(self, workers: LocalWorkers) -> None:
        lifelines = [process.lifeline for process in workers.processes]
        while True:
            plans = [] if workers.unknown else [self._plans]
            self._wait(
                time.monotonic() + _LOOK,
                [*plans, workers.reports, self._door, self._losses, *lifelines],
            )
            for plan in plans:
                for frame in receive_all(plan):
                    workers.send(frame)
            for frame in workers.receive():
                if workers.unknown:
                    workers.greet(wire.decode_report(frame.buffer))
                    if not workers.unknown:
                        # All are connected.
                        workers.remove_folder()
                else:
                    self._door.send(frame, copy=False)
            for frame in receive_all(self._door):
                if len(frame) and isinstance(
                    command := wire.decode_command(frame.buffer), wire.Farewell
                ):
                    if not command.reason:
                        return
                    self._end_with(command)
            if self._is_lost():
                raise EngineDeadError(
                    f"the connection to node 0 at {self._master} has ended: its engine has died, "
                    "or is not reached."
                )
            if (death := workers.find_death(f"on node {self.rank}")) is not None:
                raise death
