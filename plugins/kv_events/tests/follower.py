"""A subscriber as vLLM's documentation describes it: follows an engine's events into a set.

https://docs.vllm.ai/en/latest/examples/features/kv_events/
"""

from __future__ import annotations

import time
from contextlib import ExitStack

import msgspec
import zmq


class Follower:
    """The blocks that a router believes to be cached, by (group, hash)."""

    def __init__(self, endpoint, replay_endpoint=None, topic=b""):
        self._stack = ExitStack()
        context = self._stack.enter_context(zmq.Context())
        self._sub = self._stack.enter_context(context.socket(zmq.SUB))
        self._sub.linger = 0
        self._sub.subscribe(topic)
        self._sub.connect(endpoint)
        self._dealer = None
        if replay_endpoint is not None:
            self._dealer = self._stack.enter_context(context.socket(zmq.DEALER))
            self._dealer.linger = 0
            self._dealer.connect(replay_endpoint)
        self.blocks = {}
        """The event that stored each block."""
        self.next = 0
        self.ranks = set()
        self.topics = set()
        self.events = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self._stack.close()

    def replay(self, first=0, timeout=5.0):
        """Asks for the batches from a number on, and takes those not seen yet. Returns their
        numbers."""
        self._dealer.send_multipart((b"", first.to_bytes(8, "big")))
        numbers = []
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if not self._dealer.poll(100):
                continue
            empty, topic, number, payload = self._dealer.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return numbers
            numbers.append(int.from_bytes(number, "big"))
            self._take(topic, numbers[-1], payload)
        raise TimeoutError("the replay has no end")

    def read(self, timeout=0.05):
        """Takes what has come. Returns the numbers that were missing."""
        missing = []
        while self._sub.poll(timeout * 1000):
            topic, number, payload = self._sub.recv_multipart()
            assert len(number) == 8
            number = int.from_bytes(number, "big")
            missing += range(self.next, number)
            self._take(topic, number, payload)
        return missing

    def _take(self, topic, number, payload):
        if number < self.next:
            return
        self.next = number + 1
        self.topics.add(topic)
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert abs(ts - time.time()) < 60
        self.ranks.add(rank)
        for event in events:
            self._apply(event)

    def _apply(self, event):
        self.events.append(event)
        kind = event["type"]
        if kind == "AllBlocksCleared":
            self.blocks.clear()
            return
        found = [(event["group_idx"], digest) for digest in event["block_hashes"]]
        assert event["medium"] == "GPU"
        if kind == "BlockStored":
            assert len(event["token_ids"]) == len(found) * event["block_size"]
            parent = event["parent_block_hash"]
            for place, block in enumerate(found):
                assert block not in self.blocks, "it was not removed before"
                tokens = event["token_ids"][place * event["block_size"] :][: event["block_size"]]
                self.blocks[block] = (parent, tuple(tokens), event)
                parent = block[1]
        else:
            assert kind == "BlockRemoved"
            for block in found:
                del self.blocks[block]

    def tokens(self, block):
        """All tokens of the prefix that ends with a block whose predecessors are cached, or
        None."""
        parent, tokens, _ = self.blocks[block]
        if parent is None:
            return tokens
        before = (block[0], parent)
        if before not in self.blocks or (found := self.tokens(before)) is None:
            return None
        return found + tokens
