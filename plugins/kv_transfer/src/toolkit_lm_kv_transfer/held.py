"""Held: blocks that wait for peers, in host memory. Needs no torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from toolkit_lm_kv_transfer.wire import Key


@dataclass(slots=True)
class _Entry:
    data: bytearray
    readers: int
    """Number of fetches that the block waits for."""
    end: float
    """time.monotonic() at which it is freed."""


class Held:
    """Blocks within a budget of bytes. A block is freed once it is read as many times as it was
    offered, when its lease ends, or where room is short: the one that was offered longest ago goes
    first. Any thread may call any method."""

    def __init__(self, budget: int, lease: float) -> None:
        """`budget`: bytes. `lease`: seconds."""
        self._budget = budget
        self._lease = lease
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        """In the order in which their leases end."""
        self.num_bytes = 0
        self.num_expired = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def renew(self, key: Key, now: float) -> bool:
        """Offers a block once more. Returns whether it is held."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return False
            entry.readers += 1
            entry.end = now + self._lease
            self._entries.move_to_end(key)
            return True

    def put(self, key: Key, data: bytearray, now: float) -> None:
        """Holds a block, unless it is larger than the budget."""
        with self._lock:
            self._pop(key)
            if len(data) > self._budget:
                self.num_expired += 1
                return
            while self.num_bytes + len(data) > self._budget:
                self._pop(next(iter(self._entries)))
                self.num_expired += 1
            self._entries[key] = _Entry(data, 1, now + self._lease)
            self.num_bytes += len(data)

    def read(self, key: Key) -> bytearray | None:
        """The bytes of a block, which nobody writes any more; None: it is not held."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            entry.readers -= 1
            if entry.readers <= 0:
                self._pop(key)
            return entry.data

    def drop(self, key: Key) -> None:
        """Frees a block. Unknown ones are accepted."""
        with self._lock:
            self._pop(key)

    def expire(self, now: float) -> None:
        """Frees the blocks whose lease has ended."""
        with self._lock:
            while self._entries:
                key, entry = next(iter(self._entries.items()))
                if entry.end > now:
                    return
                self._pop(key)
                self.num_expired += 1

    def clear(self) -> None:
        """Frees all blocks."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def _pop(self, key: Key) -> None:
        if (entry := self._entries.pop(key, None)) is not None:
            self.num_bytes -= len(entry.data)
