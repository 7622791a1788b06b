"""Server: answers peers' questions for the blocks that a rank holds. Needs no torch."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

import msgspec
import zmq
from toolkit_lm.errors import ConfigError

from toolkit_lm_kv_transfer.held import Held
from toolkit_lm_kv_transfer.settings import Address
from toolkit_lm_kv_transfer.share import RankCounts
from toolkit_lm_kv_transfer.wire import (
    HEAD_BYTES,
    Ask,
    Block,
    Get,
    Has,
    Question,
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


class _Waiting(NamedTuple):
    client: bytes
    question: Ask
    end: float


class Server:
    """A ROUTER socket, and a thread that answers."""

    def __init__(
        self, address: Address, secret: bytes, identity: bytes, held: Held, counts: RankCounts
    ) -> None:
        """Opens the socket and starts the thread. Raises ConfigError."""
        self._identity = identity
        self._held = held
        self._counts = counts
        self._waiting: deque[_Waiting] = deque()
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

    def stored(self) -> None:
        """More blocks are held."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def close(self) -> None:
        self._ends = True
        self.stored()
        self._thread.join(timeout=5.0)
        self._held.clear()

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
        is_kin = question.identity == self._identity
        if not is_kin and not self._warned and question.keys:
            self._warned = True
            logger.warning(
                "kv_transfer: a peer has asked whose weights, options or version are others: it "
                "gets no blocks."
            )
        if isinstance(question, Get):
            self._send_blocks(client, question, is_kin=is_kin)
        elif is_kin and not self._has_all(question) and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(_Waiting(client, question, time.monotonic() + _PATIENCE))
        else:
            self._tell(client, question, is_kin=is_kin)

    def _has_all(self, question: Ask) -> bool:
        return all(key in self._held for key in question.keys)

    def _answer_waiting(self, now: float) -> None:
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if waiting.end <= now or self._has_all(waiting.question):
                self._tell(waiting.client, waiting.question, is_kin=True)
            else:
                self._waiting.append(waiting)

    def _tell(self, client: bytes, question: Ask, *, is_kin: bool) -> None:
        held = [is_kin and key in self._held for key in question.keys]
        self._router.send_multipart([client, encode(Has(question.number, is_kin, held))])

    def _send_blocks(self, client: bytes, question: Get, *, is_kin: bool) -> None:
        for key in question.keys:
            data = self._held.read(key) if is_kin else None
            there = data is not None
            head = Block(*key, there, crc32(data) if data is not None else 0)
            # Nobody writes to what is taken: it is sent without a copy.
            self._router.send_multipart([client, encode(head), data or b""], copy=False)
            self._counts.sent_blocks += there
            self._counts.sent_bytes += len(data or b"")
