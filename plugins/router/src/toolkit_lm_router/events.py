"""KV events of backends: what their caches hold. A thread receives them, and the event loop applies
them to the index of prefixes."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

import msgspec
import zmq
from msgspec import Struct

from toolkit_lm_router.fleet import Backend
from toolkit_lm_router.prefixes import Block, PrefixIndex

logger = logging.getLogger("uvicorn.error")

_MOST_BYTES = 64 * 2**20
"""Most bytes of a frame that is received."""
_HWM = 10_000
"""Most batches of a backend that wait to be read."""
_MOST_UNDER_WAY = 64
"""Most batches that wait for the event loop."""
_MOST_HELD = 1024
"""Most batches that wait for the end of a replay."""
_MOST_SOURCES = 64
"""Most engines of one backend."""
_TICK_MS = 50
_PATIENCE = 2.0
"""Seconds that published batches may take: a backend may be asked for its sources twice at once."""
_END = (1 << 64) - 1
"""Number of the message that ends a replay."""


class BlockStored(Struct, tag=True):
    """Blocks can be found. `prompt_chunks`: (digest of a prompt's beginning, hash of the block in
    which it ends)."""

    group_idx: int | None = None
    prompt_chunks: list[tuple[int, int]] | None = None


class BlockRemoved(Struct, tag=True):
    """Blocks are no longer found."""

    block_hashes: list[int]
    group_idx: int | None = None


class AllBlocksCleared(Struct, tag=True):
    """No block is found any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(Struct, array_like=True):
    ts: float
    events: list[Event]


class Source(Struct, frozen=True):
    """An engine that publishes, as /kv_event_sources tells."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    data_parallel_rank: int = 0
    num_published: int = 0


class Sources(Struct):
    """The answer of /kv_event_sources."""

    sources: list[Source]


@dataclass(slots=True, eq=False)
class Following:
    """The events of one engine, as far as they were applied."""

    backend: Backend
    source: Source
    endpoint: str
    replay_endpoint: str | None
    is_open: bool = True
    next: int = 0
    """Number of the next batch."""
    live: int = -1
    """Number of the last batch that came by itself, and not by a replay."""
    missing: int | None = None
    """Number of the first batch that was published, and has not come. None: all have come."""
    missing_since: float = 0.0
    """When it was noticed first."""
    is_understood: bool = True
    """No message was of an unknown kind."""
    held: list[tuple[int, Sequence[Event]]] | None = None
    """Batches that came during a replay. None: there is none."""


def address_of(endpoint: str, url: str) -> str | None:
    """The address at which a router reaches a backend's socket: on the machine of the backend's
    URL. None: the socket is on another, or of another kind."""
    host = urlsplit(url).hostname or ""
    kind, _, place = endpoint.partition("://")
    if kind == "ipc":
        return endpoint if _is_loopback(host) else None
    named, _, port = place.rpartition(":")
    if kind != "tcp" or not port.isdecimal():
        return None
    named = named.strip("[]")
    if _is_loopback(named) != _is_loopback(host) and not _is_any(named):
        return None
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return host == "localhost"


def _is_any(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).is_unspecified
    return host == "*"


class Followers:
    """Follows the events of backends. Only the event loop uses it."""

    def __init__(self, index: PrefixIndex, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._following: dict[Backend, dict[Source, Following]] = {}
        self._receiver = Receiver(asyncio.get_running_loop(), self.received)
        self._receiver.start()

    def close(self) -> None:
        self._receiver.close()

    def leave(self, backend: Backend) -> None:
        """A backend is no longer one, or may have lost its cache."""
        backend.is_followed = False
        for following in self._following.pop(backend, {}).values():
            self._drop(following)

    def tend(self, backend: Backend, sources: Sequence[Source]) -> None:
        """A backend has told of its engines: follows those that are new, and notices batches that
        have not come."""
        known = self._following.setdefault(backend, {})
        named = {_place(source): source for source in sources[:_MOST_SOURCES]}
        for place in known.keys() - named.keys():
            self._drop(known.pop(place))
            self._index.doubt(backend.number)
        for place, source in named.items():
            if place not in known:
                if (made := self._follow(backend, place)) is not None:
                    known[place] = made
                continue
            self._look(known[place], source.num_published)
        backend.is_followed = bool(known)

    def _look(self, following: Following, num_published: int) -> None:
        """Notices batches that do not come."""
        if num_published <= following.next:
            following.missing = None
        elif following.missing != following.next:
            following.missing = following.next
            following.missing_since = self._clock()
        elif self._clock() - following.missing_since >= _PATIENCE:
            self._end_replay(following)
            self._miss(following, num_published)

    def _follow(self, backend: Backend, place: Source) -> Following | None:
        endpoint = address_of(place.endpoint, backend.url)
        if endpoint is None:
            return None
        replay = place.replay_endpoint and address_of(place.replay_endpoint, backend.url)
        made = Following(backend, place, endpoint, replay)
        self._receiver.add(made)
        if replay:
            # The engine may have published before.
            made.held = []
            self._receiver.replay(made)
        return made

    def _drop(self, following: Following) -> None:
        following.is_open = False
        self._receiver.drop(following)

    def received(
        self, following: Following, number: int, events: Sequence[Event], *, is_replayed: bool
    ) -> None:
        """A batch has come. The number _END ends a replay."""
        if not following.is_open:
            return
        if is_replayed:
            if number == _END:
                self._end_replay(following)
            elif number >= following.next:
                self._apply(following, number, events)
            return
        is_anew = number <= following.live
        following.live = number
        if is_anew:
            # Numbers begin again with the engine.
            following.held = None
            following.next = number
            self._index.clear(following.backend.number)
        if number < following.next:
            # A replay had it.
            return
        if following.held is not None:
            if len(following.held) < _MOST_HELD:
                following.held.append((number, events))
        elif number > following.next and following.replay_endpoint:
            following.held = [(number, events)]
            self._receiver.replay(following)
        else:
            self._apply(following, number, events)

    def _end_replay(self, following: Following) -> None:
        held, following.held = following.held, None
        for number, events in held or ():
            if number >= following.next:
                self._apply(following, number, events)

    def _miss(self, following: Following, number: int) -> None:
        """Batches before `number` will not come."""
        following.backend.num_event_gaps += 1
        following.next = number
        self._index.doubt(following.backend.number)

    def _apply(self, following: Following, number: int, events: Sequence[Event]) -> None:
        backend = following.backend.number
        if number > following.next:
            self._miss(following, number)
        following.next = number + 1
        rank = following.source.data_parallel_rank
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self._index.clear(backend)
                continue
            group = event.group_idx or 0
            if isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self._index.removed(backend, Block(rank, group, block_hash))
            elif event.prompt_chunks:
                chunks = [(d, Block(rank, group, h)) for d, h in event.prompt_chunks]
                self._index.stored(backend, chunks)


def _place(source: Source) -> Source:
    return msgspec.structs.replace(source, num_published=0)


class Receiver(threading.Thread):
    """Receives the messages of all engines. Its methods may be called by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[..., None]) -> None:
        super().__init__(name="kv events of backends", daemon=True)
        self._loop = loop
        self._deliver = deliver
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closed = False
        self._under_way = threading.Semaphore(_MOST_UNDER_WAY)
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._sockets: dict[Following, tuple[zmq.Socket[bytes], zmq.Socket[bytes] | None]] = {}
        self._readers: dict[zmq.Socket[bytes], Following] = {}

    def add(self, following: Following) -> None:
        """Follows an engine."""
        self._calls.put(lambda: self._add(following))

    def drop(self, following: Following) -> None:
        """Follows an engine no more."""
        self._calls.put(lambda: self._drop(following))

    def replay(self, following: Following) -> None:
        """Asks an engine for the batches from the next one on."""
        first = following.next
        self._calls.put(lambda: self._replay(following, first))

    def close(self) -> None:
        """Ends the thread."""
        self._is_closed = True
        self.join(timeout=5.0)

    def run(self) -> None:
        try:
            while not self._is_closed:
                while not self._calls.empty():
                    self._calls.get()()
                for socket, _ in self._poller.poll(_TICK_MS):
                    if (following := self._readers.get(socket)) is not None:
                        self._read(socket, following)
        finally:
            self._context.destroy(linger=0)

    def _add(self, following: Following) -> None:
        try:
            sub = self._open(zmq.SUB, following, following.endpoint)
            sub.subscribe(following.source.topic.encode())
            dealer = None
            if following.replay_endpoint:
                dealer = self._open(zmq.DEALER, following, following.replay_endpoint)
        except zmq.ZMQError as error:
            logger.warning("The KV events at %s are not followed: %s", following.endpoint, error)
            return
        self._sockets[following] = sub, dealer

    def _open(self, kind: int, following: Following, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_HWM)
        socket.linger = 0
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        socket.connect(endpoint)
        self._poller.register(socket, zmq.POLLIN)
        self._readers[socket] = following
        return socket

    def _drop(self, following: Following) -> None:
        for socket in self._sockets.pop(following, ()):
            if socket is not None:
                self._poller.unregister(socket)
                del self._readers[socket]
                socket.close()

    def _replay(self, following: Following, first: int) -> None:
        _, dealer = self._sockets.get(following, (None, None))
        if dealer is not None:
            with suppress(zmq.ZMQError):
                dealer.send_multipart((b"", first.to_bytes(8, "big")), zmq.NOBLOCK)

    def _read(self, socket: zmq.Socket[bytes], following: Following) -> None:
        """Hands one message to the event loop. One that is none counts as missed."""
        frames = socket.recv_multipart(zmq.NOBLOCK)
        is_replayed = socket is not self._sockets[following][0]
        if len(frames) != 3 + is_replayed or len(frames[-2]) != 8:
            return
        number = int.from_bytes(frames[-2], "big")
        events: Sequence[Event] = ()
        if number != _END:
            try:
                events = self._decoder.decode(frames[-1]).events
            except msgspec.DecodeError as error:
                if following.is_understood:
                    following.is_understood = False
                    logger.warning("KV events of %s are unknown: %s", following.endpoint, error)
                return
        while not self._under_way.acquire(timeout=0.1):
            if self._is_closed:
                return

        def deliver() -> None:
            self._under_way.release()
            self._deliver(following, number, events, is_replayed=is_replayed)

        with suppress(RuntimeError):
            # The loop may have ended.
            self._loop.call_soon_threadsafe(deliver)
