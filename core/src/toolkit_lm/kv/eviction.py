"""FreeBlocks: the order in which a pool's free blocks are allocated, and their contents evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable


class FreeBlocks:
    """Blocks without contents first, then the least recently used. A subclass may have another
    order: `BlockPool.order_by`."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()
        """The first is allocated next."""

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, block: int, key: Hashable | None) -> None:
        """A block is free from now on. `key`: of its contents; None: nobody finds them."""
        self._blocks[block] = None
        if key is None:
            self._blocks.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        """A free block is shared, or its contents are forgotten."""
        del self._blocks[block]

    def pop(self) -> int:
        """Removes the block that is allocated next, and returns it."""
        return self._blocks.popitem(last=False)[0]

    def clear(self) -> None:
        """Removes all blocks."""
        self._blocks.clear()
