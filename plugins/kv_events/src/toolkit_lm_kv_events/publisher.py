"""Publisher: sends batches of events from threads of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import SimpleQueue

import zmq
from msgspec import msgpack
from toolkit_lm.errors import ConfigError

from toolkit_lm_kv_events.endpoints import parse
from toolkit_lm_kv_events.wire import END, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch

logger = logging.getLogger(__name__)

News = BlockStored | BlockRemoved | AllBlocksCleared
_GATHERED = 0.002
"""Seconds in which events gather for a batch."""
_MOST_EVENTS = 1024
"""Most events of a batch."""
_PATIENCE_MS = 1000
"""Milliseconds that a replay waits for a client that does not read."""
_REPLAY_HWM = 64
"""Most batches of a replay that wait for a client."""
_REQUEST_BYTES = 256
"""Most bytes of a frame that a client of replays may send."""
_TICK_MS = 100


class Publisher:
    """A PUB socket, and a ROUTER socket for replays. `put` never blocks: a slow subscriber misses
    batches, and sees a gap in the sequence numbers."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None,
        *,
        rank: int = 0,
        topic: str = "",
        buffer_steps: int,
        buffer_bytes: int,
        hwm: int,
        max_queue_size: int,
    ) -> None:
        """Opens the sockets and starts the threads. Raises ConfigError."""
        self.rank = rank
        self.num_overflows = 0
        self.num_published = 0
        self._topic = topic.encode()
        self._most_waiting = max_queue_size
        self._queue: SimpleQueue[News | None] = SimpleQueue()
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._buffer_steps = buffer_steps
        self._bytes_left = buffer_bytes
        self._closing = threading.Event()
        self._context = zmq.Context()
        try:
            self.endpoint, pub = self._open(zmq.PUB, "endpoint", endpoint, hwm)
            threads = [threading.Thread(target=self._publish, args=(pub,), name="kv events")]
            self.replay_endpoint = None
            if replay_endpoint is not None:
                self.replay_endpoint, router = self._open(
                    zmq.ROUTER, "replay_endpoint", replay_endpoint, _REPLAY_HWM
                )
                threads.append(
                    threading.Thread(target=self._replay, args=(router,), name="kv event replays")
                )
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._threads = threads
        # A subscriber that has seen an earlier engine of this address forgets its blocks.
        self.put(AllBlocksCleared())
        for thread in threads:
            thread.daemon = True
            thread.start()

    def _open(self, kind: int, name: str, text: str, hwm: int) -> tuple[str, zmq.Socket[bytes]]:
        """Opens a socket at this rank's address, and returns both. Raises ConfigError."""
        parsed = parse(text)
        socket = self._context.socket(kind)
        socket.set_hwm(hwm)
        socket.linger = 0
        socket.setsockopt(zmq.IPV6, int("[" in text))
        socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST_BYTES)
        if kind == zmq.ROUTER:
            # A client that does not read is noticed, and one that has gone.
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.SNDTIMEO, _PATIENCE_MS)
        try:
            address = parsed.of_rank(self.rank)
            if parsed.binds:
                socket.bind(address)
                if parsed.port == 0:
                    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT)
                    address = f"{parsed.base}:{bound.rpartition(':')[2]}"
            else:
                socket.connect(address)
        except (zmq.ZMQError, ValueError) as error:
            socket.close()
            raise ConfigError(
                f"kv_events.{name}: the socket {text!r} of engine {self.rank} cannot be opened: "
                f"{error}. Choose another address."
            ) from error
        return address, socket

    def put(self, event: News) -> None:
        """Publishes an event soon. Called by one thread."""
        if self._queue.qsize() < self._most_waiting:
            self._queue.put(event)
            return
        # No gap in the sequence numbers would show what is lost here.
        if not self.num_overflows:
            logger.warning(
                "KV events: more than %d wait to be published. Subscribers are told that the cache "
                "is empty.",
                self._most_waiting,
            )
        self.num_overflows += 1
        while not self._queue.empty():
            self._queue.get()
        self._queue.put(AllBlocksCleared())
        self._queue.put(event)

    def close(self) -> None:
        """Publishes what waits, and ends the threads."""
        self._queue.put(None)
        self._threads[0].join(timeout=1.0)
        self._closing.set()
        for thread in self._threads:
            thread.join(timeout=2.0)
        self._context.destroy(linger=0)

    def _publish(self, socket: zmq.Socket[bytes]) -> None:
        """Sends what `put` has taken. Runs in a thread of its own."""
        encoder = msgpack.Encoder()
        with socket:
            is_open = True
            while is_open:
                events = [self._queue.get()]
                if events[0] is not None and self._queue.qsize() < _MOST_EVENTS:
                    time.sleep(_GATHERED)
                while len(events) < _MOST_EVENTS and not self._queue.empty():
                    events.append(self._queue.get())
                is_open = None not in events
                news = [event for event in events if event is not None]
                if not news:
                    continue
                payload = encoder.encode(EventBatch(time.time(), news, self.rank))
                number = self.num_published
                self._remember(number, payload)
                self.num_published += 1
                # PUB never blocks.
                socket.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def _remember(self, number: int, payload: bytes) -> None:
        """Keeps a batch for replays, within the bounds."""
        self._buffer.append((number, payload))
        self._bytes_left -= len(payload)
        while len(self._buffer) > self._buffer_steps or (
            self._bytes_left < 0 and len(self._buffer) > 1
        ):
            self._bytes_left += len(self._buffer.popleft()[1])

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        """Answers requests for batches from a number on. Runs in a thread of its own."""
        with socket:
            while not self._closing.is_set():
                if not socket.poll(_TICK_MS):
                    continue
                frames = socket.recv_multipart()
                # [client, empty, number]: other requests get no answer.
                if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
                    continue
                try:
                    self._send_from(socket, frames[0], int.from_bytes(frames[2], "big"))
                except zmq.ZMQError as error:
                    logger.info("KV events: a replay has ended early: %s", error)

    def _send_from(self, socket: zmq.Socket[bytes], client: bytes, first: int) -> None:
        """Sends a client the batches that are kept from a number on. Raises ZMQError if it does
        not read, or has gone."""
        for number, payload in list(self._buffer):
            if self._closing.is_set():
                return
            if number >= first:
                frames = (client, b"", self._topic, number.to_bytes(8, "big"), payload)
                socket.send_multipart(frames)
        socket.send_multipart((client, b"", b"", END, b""))
