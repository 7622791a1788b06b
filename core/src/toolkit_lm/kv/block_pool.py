"""A pool of KV cache blocks with reference counts, and with the contents that free blocks still
hold."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class BlockPool:
    """Block ids 0 .. num_blocks - 1. A block is free (count 0) or owned by as many tables as its
    count says.

    A block may have a key that says what it holds. It keeps it when it is freed, until it is taken
    for something else: those without a key go first, then the least recently used.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evicted: Callable[[Any, int], None] | None = None
        """Told of the key and the block, when a block that is free is taken for something else."""
        self.reset()

    def reset(self) -> None:
        """All blocks are free, and nobody knows what they hold."""
        self.ref_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(self.num_blocks))
        """The next to be taken first."""
        self._blocks: dict[Hashable, int] = {}
        """By key."""
        self._keys: dict[int, Hashable] = {}
        """By block."""
        self.num_cached = 0
        """Free blocks whose contents can be found."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self) -> int:
        """A free block, now with one owner. There must be one. What it held is forgotten."""
        block, _ = self._free.popitem(last=False)
        assert self.ref_counts[block] == 0, (
            f"free block {block} has {self.ref_counts[block]} owners"
        )
        if (key := self.forget(block)) is not None and self.on_evicted is not None:
            self.on_evicted(key, block)
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner of an owned block, or the first of a free one whose contents are
        wanted."""
        if self.ref_counts[block] == 0:
            assert block in self._keys, f"block {block} is free, and nobody knows what it holds"
            del self._free[block]
            self.num_cached -= 1
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One owner less; the last one frees the block."""
        assert self.ref_counts[block] > 0, f"block {block} is freed twice"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free[block] = None
            if block in self._keys:
                self.num_cached += 1
            else:
                self._free.move_to_end(block, last=False)

    # Contents

    def find(self, key: Hashable) -> int | None:
        """The block that holds what `key` says."""
        return self._blocks.get(key)

    def publish(self, key: Hashable, block: int) -> None:
        """Says what an owned block holds. Of two that hold the same, the first is found."""
        assert self.ref_counts[block] > 0, f"block {block} is free"
        if key not in self._blocks and block not in self._keys:
            self._blocks[key] = block
            self._keys[block] = key

    def forget(self, block: int) -> Hashable | None:
        """Its contents are found no more. Returns their key; None: nobody knew what it holds."""
        if (key := self._keys.pop(block, None)) is not None:
            del self._blocks[key]
            self.num_cached -= self.ref_counts[block] == 0
        return key

    def forget_all(self) -> None:
        """Nobody will find what any block holds now."""
        self._blocks.clear()
        self._keys.clear()
        self.num_cached = 0
