"""A pool of KV cache blocks with reference counts."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Block ids 0 .. num_blocks - 1. A block is free (count 0) or owned by as many tables as its count says."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def take(self) -> int:
        """A free block, now with one owner. There must be one."""
        block = self._free.popleft()
        assert self.ref_counts[block] == 0, f"free block {block} has {self.ref_counts[block]} owners"
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more owner of an owned block."""
        assert self.ref_counts[block] > 0, f"block {block} is free and cannot be shared"
        self.ref_counts[block] += 1

    def release(self, block: int) -> None:
        """One owner less; the last one frees the block."""
        assert self.ref_counts[block] > 0, f"block {block} is freed twice"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self._free.append(block)
