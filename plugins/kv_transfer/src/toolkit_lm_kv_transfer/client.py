"""Client: fetches blocks of peers. Needs no torch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple
from zlib import crc32

import msgspec
import zmq
from toolkit_lm.kv import Data

from toolkit_lm_kv_transfer.arena import SharedMemory
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.share import RankCounts
from toolkit_lm_kv_transfer.wire import (
    HEAD_BYTES,
    MOST_KEYS,
    ArenaName,
    Ask,
    Block,
    Done,
    Get,
    Has,
    Key,
    Question,
    State,
    decode_answer,
    encode,
    make_socket,
)

logger = logging.getLogger(__name__)

_TICK_MS = 50
_PING = 1.0
"""Seconds from one question whether a peer is there to the next."""
_SILENCE = 5.0
"""Seconds without an answer after which a peer is not there."""
_START = 1.0
"""Seconds that the first connections may take."""
_WINDOW = 64 * 2**20
"""Most bytes that one peer is asked for at a time."""


class FetchError(Exception):
    """A block has not come. The text says why."""


class Patience(NamedTuple):
    """How long blocks are waited for, in seconds."""

    timeout: float
    """Without a block, or a word of the peer that computes it."""
    lease: float
    """While a peer computes them, without a block."""


@dataclass(slots=True, eq=False)
class _Peer:
    address: Address
    socket: zmq.Socket[bytes]
    heard: float = float("-inf")
    """time.monotonic() of its last answer."""
    asked: float = float("-inf")
    """time.monotonic() of the last question whether it is there."""
    brought: float = float("-inf")
    """time.monotonic() of its last block."""
    queue: deque[Key] = field(default_factory=deque)
    """Blocks that it has, and is not asked for yet."""
    num_bytes: int = 0
    """Bytes that it is asked for, and has not sent."""
    asks: dict[int, list[Key]] = field(default_factory=dict)
    """Questions that it has not answered, by number."""
    arena: ArenaName | None = None
    """The arena that it has named last."""
    memory: SharedMemory | None = None
    """That arena, if this process can open it."""
    loans: list[int] = field(default_factory=list)
    """Places of the arena that are read, and not given back."""


@dataclass(slots=True, eq=False)
class _Wanted:
    futures: list[Future[Data]]
    since: float
    silent: set[_Peer]
    """Peers that have not said whether they have it."""
    source: _Peer | None = None
    """The peer that has it, or computes it."""
    is_coming: bool = False
    """The source computes it."""
    is_counted: bool = False
    """It is in the `num_bytes` of its source."""


class Client:
    """A DEALER socket for each peer, and a thread that asks all of them and takes each block from
    the first that has it."""

    def __init__(
        self,
        peers: Sequence[Address],
        secret: bytes,
        identity: bytes,
        sizes: Sequence[int],
        patience: Patience,
        counts: RankCounts,
    ) -> None:
        """`sizes`: bytes of a block, by KV group."""
        self._identity = identity
        self._sizes = sizes
        self._patience = patience
        self._counts = counts
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._new: deque[tuple[Key, Future[Data]]] = deque()
        self._wanted: dict[Key, _Wanted] = {}
        self._early: dict[Key, float] = {}
        """Blocks that peers may not know of yet, with the time.monotonic() until which that is so,
        in this order."""
        self._again: list[Key] = []
        """Blocks of these that no peer has: all are asked once more."""
        self._began = time.monotonic()
        self._looked = 0.0
        self._ends = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        most = max([*sizes, HEAD_BYTES])
        self._peers = [
            _Peer(address, make_socket(self._context, zmq.DEALER, secret, most, serves=False))
            for address in peers
        ]
        for peer in self._peers:
            # Nothing is kept for a peer that is not there.
            peer.socket.setsockopt(zmq.IMMEDIATE, 1)
            peer.socket.connect(peer.address.endpoint)
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv_transfer fetch", daemon=True)
        self._thread.start()

    def fetch(self, key: Key) -> Future[Data]:
        """A future of a block's bytes. It fails with FetchError."""
        future: Future[Data] = Future()
        with self._lock:
            if self._ends:
                future.set_exception(FetchError("the engine ends"))
                return future
            self._new.append((key, future))
        with suppress(OSError):
            self._waker.send(b"\0")
        return future

    def expect(self, keys: Sequence[Key]) -> None:
        """Peers are about to compute these blocks. Before or after `fetch`."""
        end = time.monotonic() + self._patience.lease
        with self._lock:
            for key in keys:
                self._early.pop(key, None)
                self._early[key] = end

    def close(self) -> None:
        with self._lock:
            self._ends = True
        with suppress(OSError):
            self._waker.send(b"\0")
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken.fileno(), zmq.POLLIN)
        for peer in self._peers:
            poller.register(peer.socket, zmq.POLLIN)
        try:
            while not self._ends:
                poller.poll(_TICK_MS)
                with suppress(BlockingIOError):
                    self._woken.recv(65536)
                now = time.monotonic()
                for peer in self._peers:
                    self._receive(peer, now)
                self._look(now)
                self._begin(now)
        finally:
            for key in [*self._wanted]:
                self._fail(key, "unreachable", "the engine ends")
            with self._lock:
                for _, future in self._new:
                    future.set_exception(FetchError("the engine ends"))
                self._new.clear()
            for peer in self._peers:
                self._share(peer, None)
            self._context.destroy(linger=0)
            self._woken.close()
            self._waker.close()

    def _begin(self, now: float) -> None:
        """Asks the peers for what is newly wanted."""
        reachable = [peer for peer in self._peers if now - peer.heard < _SILENCE]
        if not reachable and now - self._began < _START:
            return
        with self._lock:
            new, self._new = self._new, deque()
        keys = []
        for key, future in new:
            if key in self._wanted:
                self._wanted[key].futures.append(future)
            else:
                self._wanted[key] = _Wanted([future], now, set())
                keys.append(key)
        self._ask(keys, reachable)

    def _ask(self, keys: list[Key], reachable: Sequence[_Peer]) -> None:
        """Asks these peers which of the wanted blocks they have."""
        for key in keys:
            self._wanted[key].silent = set(reachable)
        for start in range(0, len(keys), MOST_KEYS):
            some = keys[start : start + MOST_KEYS]
            for peer in reachable:
                number = next(self._numbers)
                if self._send(peer, self._question(peer, number, some)):
                    peer.asks[number] = some
        if not reachable:
            for key in keys:
                self._fail(key, "unreachable", "no peer can be reached")

    def _question(self, peer: _Peer, number: int, keys: list[Key]) -> Ask:
        return Ask(number, self._identity, keys, peer.memory is not None)

    def _send(self, peer: _Peer, question: Question) -> bool:
        """Whether there is a connection that takes it."""
        try:
            peer.socket.send(encode(question), zmq.NOBLOCK)
        except zmq.Again:
            self._lose(peer)
            return False
        return True

    def _lose(self, peer: _Peer) -> None:
        """A peer has no connection: others may have what it was asked for."""
        peer.heard = float("-inf")
        peer.queue.clear()
        peer.asks.clear()
        peer.loans.clear()
        peer.num_bytes = 0
        self._share(peer, None)
        for key, wanted in [*self._wanted.items()]:
            was_asked = peer in wanted.silent
            wanted.silent.discard(peer)
            if wanted.source is peer or (was_asked and not wanted.silent and not wanted.source):
                self._fail(key, "unreachable", f"{peer.address} cannot be reached")

    def _receive(self, peer: _Peer, now: float) -> None:
        while True:
            try:
                frames = peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                answer = decode_answer(frames[0].buffer)
            except msgspec.MsgspecError:
                self._count("foreign")
                continue
            peer.heard = now
            if isinstance(answer, Has):
                self._hear(peer, answer)
            elif len(frames) == 2:
                peer.brought = now
                self._accept(peer, answer, frames[1].buffer)
        self._get(peer)
        while peer.loans:
            loans, peer.loans = peer.loans[:MOST_KEYS], peer.loans[MOST_KEYS:]
            self._send(peer, Done(loans))

    def _hear(self, peer: _Peer, answer: Has) -> None:
        if answer.arena is not None and answer.arena != peer.arena:
            self._share(peer, answer.arena)
        keys = peer.asks.pop(answer.number, [])
        states = answer.states
        if len(keys) != len(states):
            self._count("foreign")
            states = [State.ABSENT] * len(keys)
        coming: list[Key] = []
        for key, state in zip(keys, states, strict=True):
            wanted = self._wanted.get(key)
            if wanted is None or wanted.source is not None:
                continue
            wanted.silent.discard(peer)
            if state is State.HELD:
                wanted.source = peer
                peer.queue.append(key)
            elif state is State.COMING:
                wanted.source = peer
                wanted.is_coming = True
                coming.append(key)
            elif not wanted.silent:
                if answer.is_kin and key in self._early:
                    self._again.append(key)
                else:
                    reason = "missing" if answer.is_kin else "foreign"
                    self._fail(key, reason, "no peer has the block")
        for start in range(0, len(coming), MOST_KEYS):
            # They come as they are computed: no more of them than that are under way.
            self._send(peer, self._getting(peer, coming[start : start + MOST_KEYS]))

    def _share(self, peer: _Peer, arena: ArenaName | None) -> None:
        """Opens a peer's arena, where that is possible."""
        if peer.memory is not None:
            peer.memory.close()
        peer.arena = arena
        peer.memory = None
        if arena is None:
            return
        try:
            peer.memory = SharedMemory(arena)
        except (OSError, ValueError) as error:
            logger.debug("kv_transfer: %s is reached over TCP: %s", peer.address, error)
        else:
            # The peer puts blocks there from now on.
            self._send(peer, self._question(peer, 0, []))

    def _getting(self, peer: _Peer, keys: list[Key]) -> Get:
        return Get(next(self._numbers), self._identity, keys, peer.memory is not None)

    def _get(self, peer: _Peer) -> None:
        """Asks a peer for as many of its blocks as may be under way."""
        while peer.queue and peer.num_bytes < _WINDOW:
            keys: list[Key] = []
            while peer.queue and peer.num_bytes < _WINDOW and len(keys) < MOST_KEYS:
                key = peer.queue.popleft()
                if key in self._wanted:
                    keys.append(key)
                    self._wanted[key].is_counted = True
                    peer.num_bytes += self._sizes[key[0]]
            if keys and not self._send(peer, self._getting(peer, keys)):
                return

    def _accept(self, peer: _Peer, block: Block, data: Data) -> None:
        key = (block.group, block.digest)
        if block.loan:
            peer.loans.append(block.loan)
        wanted = self._wanted.get(key)
        if wanted is None or wanted.source is not peer:
            self._count("foreign")
            return
        size = self._sizes[block.group]
        if wanted.is_counted:
            peer.num_bytes -= size
        is_shared = block.place >= 0
        if is_shared:
            data = b"" if peer.memory is None else peer.memory.read(block.place, size)
        if not block.is_there:
            self._fail(key, "missing", f"{peer.address} has lost the block")
        elif len(data) != size or crc32(data) != block.checksum:
            self._fail(key, "damaged", f"{peer.address} has sent a damaged block")
        else:
            self._counts.fetched_blocks += 1
            self._counts.fetched_bytes += size
            self._counts.shared_blocks += is_shared
            for future in self._wanted.pop(key).futures:
                future.set_result(data)

    def _look(self, now: float) -> None:
        """Asks peers whether they are there, and gives up what does not come."""
        if now - self._looked < _TICK_MS / 1000:
            return
        self._looked = now
        for peer in self._peers:
            if now - peer.asked >= (_PING if now - peer.heard < _SILENCE else _TICK_MS / 1000):
                peer.asked = now
                self._send(peer, self._question(peer, 0, []))
        self._counts.reachable_peers = sum(now - peer.heard < _SILENCE for peer in self._peers)
        for key, wanted in [*self._wanted.items()]:
            if (seconds := self._waited(wanted, now)) is not None:
                self._fail(key, "late", f"no block within {seconds} s")
                if wanted.source is not None:
                    wanted.source.num_bytes = 0
        with self._lock:
            while self._early and next(iter(self._early.values())) <= now:
                del self._early[next(iter(self._early))]
        again, self._again = [key for key in self._again if key in self._wanted], []
        if again:
            self._ask(again, [peer for peer in self._peers if now - peer.heard < _SILENCE])

    def _waited(self, wanted: _Wanted, now: float) -> float | None:
        """The seconds after which a block is given up, if these are over."""
        source = wanted.source
        last = wanted.since
        if source is not None:
            last = max(last, source.brought)
        if source is None or not wanted.is_coming:
            return self._patience.timeout if now - last > self._patience.timeout else None
        silence = max(self._patience.timeout, 2 * _PING)
        if now - max(last, source.heard) > silence:
            return silence
        return self._patience.lease if now - last > self._patience.lease else None

    def _fail(self, key: Key, reason: str, text: str) -> None:
        self._count(reason)
        for future in self._wanted.pop(key).futures:
            future.set_exception(FetchError(text))

    def _count(self, reason: str) -> None:
        self._counts.failures[reason] = self._counts.failures.get(reason, 0) + 1
