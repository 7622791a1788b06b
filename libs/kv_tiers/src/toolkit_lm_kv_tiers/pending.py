"""Pending: blocks that wait to be written behind the steps. Needs no torch."""

from __future__ import annotations

import threading

from toolkit_lm.kv import BlockBytes

from toolkit_lm_kv_tiers.pricing import Key

_MOST = 2**29
"""Most bytes that wait. What comes beyond is not stored."""
_MOST_SPARE = 2**26
"""Most bytes of memory that is kept for later blocks. Memory that is used for the first time costs
a step several times as much as the copy."""


class Pending:
    """Copies of blocks, by name, until they are written. Any thread may call it."""

    def __init__(self) -> None:
        self._blocks: dict[Key, bytearray] = {}
        self._num_bytes = 0
        """Bytes of these, and of those that were dropped or replaced and are not done with."""
        self._spare: dict[int, list[bytearray]] = {}
        """Memory of blocks that were written, by its size."""
        self._num_spare = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, name: Key) -> bool:
        return name in self._blocks

    def add(self, name: Key, block: BlockBytes) -> bytearray | None:
        """Copies a block. Returns the copy, which `done` is told of later. None: too much waits."""
        size = block.num_bytes
        with self._lock:
            if self._num_bytes + size > _MOST:
                return None
            self._num_bytes += size
            spare = self._spare.get(size)
            data = spare.pop() if spare else None
            self._num_spare -= 0 if data is None else size
        if data is None:
            data = bytearray(size)
        block.read_into(data)
        with self._lock:
            self._blocks[name] = data
        return data

    def find(self, name: Key) -> bytes | None:
        """Bytes of a block that waits; None: it does not."""
        with self._lock:
            data = self._blocks.get(name)
            return None if data is None else bytes(data)

    def drop(self, name: Key) -> None:
        """A block is not wanted any more."""
        with self._lock:
            self._blocks.pop(name, None)

    def is_wanted(self, name: Key, data: bytearray) -> bool:
        """Whether a copy is to be written: it was not dropped, and not stored again."""
        return self._blocks.get(name) is data

    def done(self, name: Key, data: bytearray) -> None:
        """A copy was written, or will not be. Nobody reads it any more."""
        with self._lock:
            self._num_bytes -= len(data)
            if self._blocks.get(name) is data:
                del self._blocks[name]
            if self._num_spare + len(data) <= _MOST_SPARE:
                self._num_spare += len(data)
                self._spare.setdefault(len(data), []).append(data)
