"""The engine's connections to the other nodes."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed
import zmq
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, EngineDeadError

from toolkit_lm_executor_mp import wire
from toolkit_lm_executor_mp.network import (
    Master,
    endpoint,
    make_socket,
    read_key,
    shut,
    unshut,
    versions,
)

_BEAT = b""
"""The empty message that probes a node. Sending it fails if the node has gone."""
_LOOK = 0.5
"""Seconds between two checks that the nodes are there."""
_LINGER = 1000
"""Milliseconds that the last message gets to be sent."""


def make_nodes(context: zmq.Context[zmq.Socket[bytes]], config: VllmConfig) -> Nodes | None:
    """Makes the connections to the other nodes, or returns None if there is one machine.

    Raises ConfigError for a config that several nodes cannot run.
    """
    node = config.node
    nodes = config.parallel.nodes
    if nodes == 1:
        if node.node_rank or node.master is not None:
            raise ConfigError(
                f"node_rank {node.node_rank} and master {node.master} are for several machines: "
                "give nodes=2 or more."
            )
        return None
    if node.node_rank:
        raise ConfigError(
            f"node {node.node_rank} holds no engine: run `toolkit worker --master {node.master} "
            f"--node-rank {node.node_rank}` there."
        )
    if config.parallel.data_parallel_size > 1:
        raise ConfigError(
            "data_parallel_size is for one machine: with several nodes, put a balancer in front of "
            "several servers."
        )
    return Nodes(
        context,
        config,
        Master.parse(node.master),
        read_key(node),
        range(config.parallel.ranks_per_node),
    )


class _Node:
    """A connection of a node that has said hello."""

    def __init__(self, hello: wire.NodeHello) -> None:
        self.hello = hello
        self.nonce = secrets.token_bytes(wire.KEY_BYTES)
        self.has_joined = False

    def __str__(self) -> str:
        return f"node {self.hello.node} ({self.hello.host}, process {self.hello.pid})"


class Nodes:
    """Nodes 1 and up. Each runs a node.Node, which forwards its ranks' commands and reports.

    `door` is for the thread that listens. `send` is for the holder of the calls' lock.
    """

    runs = "`toolkit worker`"
    """Command that runs on a node, for errors."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        config: VllmConfig,
        master: Master,
        key: bytes,
        local_ranks: Sequence[int],
    ) -> None:
        """Listens at the master's address.

        Raises ConfigError if that address is not this machine's, or its port is in use.

        `local_ranks`: the ranks of node 0, which come first. The other nodes share the rest evenly.
        """
        parallel = config.parallel
        self.local_ranks = local_ranks
        self._ranks_per_node = parallel.ranks_per_node
        self.num_nodes = 1 + (parallel.num_ranks - len(local_ranks)) // self._ranks_per_node
        self._timeout = config.engine.start_timeout
        self.margin = min(10.0, self._timeout / 2)
        """Seconds before the end of the start by which all nodes must have joined. The front-end's
        own timeout began earlier, and the error must reach it in time."""
        self._key = key
        self._versions = versions()
        self.master = master
        """Address where the nodes reach the engine. Port 0 is any free one."""
        self._owner = os.getpid()
        self._nodes: dict[bytes, _Node] = {}
        """Nodes by the identity of their connection to `door`."""
        self._failure: tuple[_Node, wire.NodeFailed] | None = None
        self._num_refused = 0
        self._next_look = 0.0
        self.door = make_socket(
            context, zmq.ROUTER, self._key, config.node.node_timeout, is_master=True
        )
        # A message to who has gone is an error.
        self.door.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._refusals = self.door.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._plans: dict[int, zmq.Socket[bytes]] = {}
        self._store_listener: socket.socket | None = None
        self._num_meetings = 0
        """Meetings that have not ended. Ranks may reconnect before an earlier attempt is over."""
        self._connected: set[int] = set()
        """Numbers of the nodes that have been sent a command."""
        try:
            self.address = self._bind()
            for node in range(1, self.num_nodes):
                self._plans[node] = make_socket(
                    context, zmq.PUSH, self._key, config.node.node_timeout, is_master=True
                )
                self._plans[node].setsockopt(zmq.SNDTIMEO, int(1000 * self.margin))
                self._plans[node].bind(endpoint(self.address, "*"))
            self._store, self._store_listener = self._make_store()
        except BaseException:
            self.close("")
            raise

    def _bind(self) -> str:
        try:
            address = self.master.resolve()
            self.door.bind(endpoint(address, self.master.port))
        except (OSError, zmq.ZMQError) as error:
            raise ConfigError(
                f"node 0 cannot listen at {self.master} (master): {error.strerror}."
            ) from error
        self.master = self.master._replace(port=_port(self.door))
        return address

    def _make_store(self) -> tuple[Any, socket.socket]:
        """Makes the store where ranks meet, on the master's address alone.

        Returns the store and a duplicate of its listening socket. The store serves as long as it is
        held.
        """
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind((self.address, 0))
            listener.listen()
            port: int = listener.getsockname()[1]
            ours = listener.dup()
            dist: Any = torch.distributed
            store = dist.TCPStore(
                self.address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=self._timeout),
                master_listen_fd=listener.fileno(),
            )
            # It is the store's now.
            listener.detach()
        # Nobody has a reason to come before `meeting`.
        shut(ours)
        return store, ours

    def meeting(self, folder: str) -> wire.Connect:
        """The command that has the ranks meet in the store. It holds a key with which they sign
        their values.

        The store stays open until `end_meeting` was called for each meeting.
        """
        assert self._store_listener is not None, "the nodes are not closed"
        if not self._num_meetings:
            unshut(self._store_listener)
        self._num_meetings += 1
        return wire.Connect(
            folder, self._store_listener.getsockname()[1], secrets.token_bytes(wire.KEY_BYTES)
        )

    def end_meeting(self) -> None:
        """Ends a meeting, whether or not its ranks are connected. After the last one the store
        accepts no connections."""
        self._num_meetings -= 1
        if not self._num_meetings and self._store_listener is not None:
            shut(self._store_listener)

    @property
    def missing(self) -> list[int]:
        """Nodes that have not joined."""
        joined = {node.hello.node for node in self._nodes.values() if node.has_joined}
        return [node for node in range(1, self.num_nodes) if node not in joined]

    def late(self) -> EngineDeadError:
        """The error of a start that not all nodes have joined."""
        missing = ", ".join(map(str, self.missing))
        were = "nodes" if len(self.missing) > 1 else "node"
        while self._refusals.poll(0):
            self._refusals.recv_multipart()
            self._num_refused += 1
        hint = (
            f" {self._num_refused} connections were refused: who made them has another launch key."
            if self._num_refused
            else ""
        )
        return EngineDeadError(
            f"{were} {missing} of {self.num_nodes} did not come to {self.master} within "
            f"start_timeout: {self.runs} must run there.{hint}"
        )

    def ranks_of(self, number: int) -> list[int]:
        """The ranks of a node. `number`: from 1 on."""
        first = len(self.local_ranks) + (number - 1) * self._ranks_per_node
        return list(range(first, first + self._ranks_per_node))

    def machine(self, rank: int) -> str:
        """The node of a rank, for errors, such as " of node 1 (host)"."""
        node = next(
            (node for node in self._nodes.values() if rank in self.ranks_of(node.hello.node)), None
        )
        return " of node 0" if node is None else f" of node {node.hello.node} ({node.hello.host})"

    def send(self, message: bytes) -> None:
        """Sends an encoded command to the workers of all nodes."""
        for number, plan in self._plans.items():
            # The first command waits for a node that connects. Later on, who is not connected has
            # gone, as `find_death` will say.
            with suppress(zmq.Again):
                plan.send(
                    message, zmq.NOBLOCK if number in self._connected else 0, len(message) < 2**16
                )
                self._connected.add(number)

    def receive(self) -> list[zmq.Frame]:
        """Receives the reports of other nodes' workers, and handles the nodes' own.

        Raises ConfigError for a node that does not fit.
        """
        taken: list[zmq.Frame] = []
        while True:
            try:
                name, *frames = self.door.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return taken
            node = self._nodes.get(name.bytes)
            if len(frames) > 1:
                self._process(name.bytes, node, wire.decode_report(frames[1].buffer))
            elif node is not None and node.has_joined:
                taken += frames

    def _process(self, name: bytes, node: _Node | None, report: wire.Report) -> None:
        """Handles a node's own report. An empty frame marks one."""
        if node is None and isinstance(report, wire.NodeHello):
            node = self._nodes[name] = _Node(report)
            proof = wire.prove(self._key, "engine", report.node, report.nonce)
            self._tell(name, wire.Challenge(proof, node.nonce))
        elif node is not None and isinstance(report, wire.NodeFailed):
            self._failure = self._failure or (node, report)
        elif node is not None and isinstance(report, wire.NodeProof) and not node.has_joined:
            number = node.hello.node
            if not secrets.compare_digest(
                report.proof, wire.prove(self._key, "node", number, node.nonce)
            ):
                raise EngineDeadError(
                    f"who calls itself node {number} does not know the key of the launch."
                )
            self._check(node)
            node.has_joined = True
            self._tell(name, wire.Welcome(self.ranks_of(number), _port(self._plans[number])))

    def _check(self, node: _Node) -> None:
        number = node.hello.node
        if not 1 <= number < self.num_nodes:
            raise ConfigError(
                f"{node} is not among the {self.num_nodes} nodes: its node_rank must be from 1 "
                f"to {self.num_nodes - 1}. "
                f"Node 0 is here ({socket.gethostname()})."
            )
        for other in self._nodes.values():
            if other.has_joined and other.hello.node == number:
                raise ConfigError(f"two machines have the same node_rank: {other} and {node}.")
        there = node.hello.versions
        different = [
            f"{name} {here} here, {there.get(name)} there"
            for name, here in self._versions.items()
            if here != there.get(name)
        ]
        if different:
            raise ConfigError(
                f"{node} has other versions than node 0 ({socket.gethostname()}; 'here': node 0; "
                f"'there': node {number}): "
                f"{'; '.join(different)}."
            )

    def _tell(self, name: bytes, command: wire.Command) -> None:
        # Who has gone meanwhile is noticed by `find_death`.
        with suppress(zmq.ZMQError):
            self.door.send_multipart([name, wire.encode(command)], zmq.NOBLOCK)

    def find_death(self, doing: str) -> EngineDeadError | None:
        """The error of a node that has failed or gone, or None. `doing`: a phrase for it, such as
        "in step 7"."""
        if self._failure is not None:
            node, failed = self._failure
            death = EngineDeadError(f"{failed.message.rstrip('.')} ({node}, {doing}).")
            for note in failed.notes:
                death.add_note(note)
            return death
        if time.monotonic() < self._next_look:
            return None
        self._next_look = time.monotonic() + _LOOK
        for name, node in list(self._nodes.items()):
            try:
                self.door.send_multipart([name, _BEAT], zmq.NOBLOCK)
            except zmq.ZMQError:
                del self._nodes[name]
                if node.has_joined:
                    ranks = ", ".join(map(str, self.ranks_of(node.hello.node)))
                    return EngineDeadError(
                        f"{node} has gone {doing}, with rank {ranks}: its {self.runs} has died, "
                        "or is not reached any more."
                    )
        return None

    def dismiss(self, reason: str) -> None:
        """Tells the nodes to end. `reason`: "" if nothing has failed."""
        for name in self._nodes:
            self._tell(name, wire.Farewell(reason))
        self._nodes.clear()

    def close(self, reason: str) -> None:
        """Tells the nodes to end, and closes the sockets. A fork of the engine leaves the nodes
        alone."""
        if os.getpid() == self._owner:
            self.dismiss(reason)
        self.door.disable_monitor()
        self._refusals.close(linger=0)
        self.door.close(linger=_LINGER)
        for plan in self._plans.values():
            plan.close(linger=0)
        self._store = None
        if self._store_listener is not None:
            self._store_listener.close()
            self._store_listener = None


def _port(socket: zmq.Socket[bytes]) -> int:
    """The port at which a socket listens."""
    return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
