"""Server: answers peers' questions for the blocks that a rank holds. Needs no torch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import Counter, deque
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

import msgspec
import zmq
from toolkit_lm.errors import ConfigError
from toolkit_lm.kv import Data

from toolkit_lm_kv_transfer.held import Held, Loan
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.share import News, RankCounts
from toolkit_lm_kv_transfer.wire import (
    HEAD_BYTES,
    Ask,
    Block,
    Done,
    Get,
    Has,
    Key,
    Question,
    State,
    decode_question,
    encode,
    make_socket,
)

logger = logging.getLogger(__name__)

_TICK_MS = 100
"""Milliseconds from one look at leases to the next."""
_PATIENCE = 0.5
"""Seconds that a question waits for blocks that are about to be stored: a peer may ask as soon as
the answer of the prefill is on its way."""
_MOST_WAITING = 1024
"""Most questions that wait."""
_MOST_TAKERS = 2**20
"""Most blocks that are asked for before they are there."""


class _Waiting(NamedTuple):
    client: bytes
    question: Ask
    end: float


class _Taker(NamedTuple):
    """Who gets a block as soon as it is there."""

    client: bytes
    shares: bool


class Server:
    """A ROUTER socket, and a thread that answers. A block that is asked for while a request
    computes it is sent as soon as it is stored."""

    def __init__(
        self, address: Address, secret: bytes, identity: bytes, held: Held, counts: RankCounts
    ) -> None:
        """Opens the socket and starts the thread. Raises ConfigError."""
        self._identity = identity
        self._held = held
        self._counts = counts
        self._waiting: deque[_Waiting] = deque()
        self._stored: deque[Key] = deque()
        """Blocks that were stored since the thread has looked."""
        self._news: deque[News] = deque()
        """What the thread has not read yet."""
        self._coming: dict[str, list[Key]] = {}
        """Blocks that requests will offer, by request."""
        self._num_coming: Counter[Key] = Counter()
        """Numbers of these requests, by block."""
        self._takers: dict[Key, list[_Taker]] = {}
        self._num_takers = 0
        self._ends = False
        self._warned = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = make_socket(self._context, zmq.ROUTER, secret, HEAD_BYTES, serves=True)
        try:
            self._router.bind(address.endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_transfer.listen: {address} cannot be opened: {error}. Choose another address."
            ) from error
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._serve, name="kv_transfer serve", daemon=True)
        self._thread.start()

    def stored(self, key: Key) -> None:
        """A block is held from now on."""
        self._stored.append(key)
        self._wake()

    def hear(self, news: News) -> None:
        """Requests have begun or ended. Blocks of those that end were stored before."""
        self._news.append(news)
        self._wake()

    def close(self) -> None:
        self._ends = True
        self._wake()
        self._thread.join(timeout=5.0)
        self._held.close()

    def _wake(self) -> None:
        with suppress(OSError):
            self._waker.send(b"\0")

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._woken.fileno(), zmq.POLLIN)
        try:
            while not self._ends:
                poller.poll(_TICK_MS)
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                self._receive()
                self._read_news()
                while self._stored:
                    self._serve_takers(self._stored.popleft())
                now = time.monotonic()
                self._answer_waiting(now)
                self._held.expire(now)
        finally:
            self._context.destroy(linger=0)
            self._woken.close()
            self._waker.close()

    def _receive(self) -> None:
        for _ in range(64):
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # Whoever holds the secret and sends something else is of another version.
            with suppress(msgspec.MsgspecError, ValueError):
                client, body = parts
                self._handle(client, decode_question(body))

    def _handle(self, client: bytes, question: Question) -> None:
        if isinstance(question, Done):
            for number in question.loans:
                self._held.give_back(number)
            return
        is_kin = question.identity == self._identity
        if not is_kin and not self._warned and question.keys:
            self._warned = True
            logger.warning(
                "kv_transfer: a peer has asked whose weights, options or version are others: it "
                "gets no blocks."
            )
        if question.shares and is_kin:
            self._held.shares = True
        if isinstance(question, Get):
            self._send_blocks(client, question, is_kin=is_kin)
        elif is_kin and not self._knows_all(question) and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(_Waiting(client, question, time.monotonic() + _PATIENCE))
        else:
            self._tell(client, question, is_kin=is_kin)

    def _state(self, key: Key) -> State:
        if key in self._held:
            return State.HELD
        return State.COMING if key in self._num_coming else State.ABSENT

    def _knows_all(self, question: Ask) -> bool:
        return all(self._state(key) is not State.ABSENT for key in question.keys)

    def _answer_waiting(self, now: float) -> None:
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if waiting.end <= now or self._knows_all(waiting.question):
                self._tell(waiting.client, waiting.question, is_kin=True)
            else:
                self._waiting.append(waiting)

    def _tell(self, client: bytes, question: Ask, *, is_kin: bool) -> None:
        states = [self._state(key) if is_kin else State.ABSENT for key in question.keys]
        arena = self._held.arena if is_kin else None
        self._router.send_multipart([client, encode(Has(question.number, is_kin, states, arena))])

    def _read_news(self) -> None:
        while self._news:
            news = self._news.popleft()
            for request_id, keys in news.begun:
                if request_id not in self._coming:
                    self._coming[request_id] = keys
                    self._num_coming.update(keys)
            for request_id in news.ended:
                for key in self._coming.pop(request_id, ()):
                    self._num_coming[key] -= 1
                    if not self._num_coming[key]:
                        del self._num_coming[key]
                        # Whoever waits hears that it does not come, if it has not.
                        self._serve_takers(key)

    def _serve_takers(self, key: Key) -> None:
        """Answers those who wait for a block, once it is there or does not come."""
        takers = self._takers.pop(key, [])
        self._num_takers -= len(takers)
        for taker in takers:
            self._send_or_wait(taker, key)

    def _send_blocks(self, client: bytes, question: Get, *, is_kin: bool) -> None:
        taker = _Taker(client, question.shares)
        for key in question.keys:
            if is_kin:
                self._send_or_wait(taker, key)
            else:
                self._send(taker, key, None)

    def _send_or_wait(self, taker: _Taker, key: Key) -> None:
        loan = self._held.read(key, time.monotonic(), lends=taker.shares)
        if loan is None and key in self._num_coming and self._num_takers < _MOST_TAKERS:
            self._takers.setdefault(key, []).append(taker)
            self._num_takers += 1
        else:
            self._send(taker, key, loan)

    def _send(self, taker: _Taker, key: Key, loan: Loan | None) -> None:
        head = Block(*key, False, 0)
        data: Data = b""
        if loan is not None:
            head = Block(*key, True, crc32(loan.data), loan.place, loan.number)
            if loan.place < 0:
                data = loan.data
            self._counts.sent_blocks += 1
            self._counts.sent_bytes += len(loan.data)
        # Nobody writes to what is taken: it is sent without a copy.
        self._router.send_multipart([taker.client, encode(head), data], copy=False)
