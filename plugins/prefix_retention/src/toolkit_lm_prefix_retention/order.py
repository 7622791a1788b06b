"""PriorityBlocks: the eviction order of priorities. Needs no torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from toolkit_lm.kv import FreeBlocks

DEFAULT = 35
"""Priority of contents without a mark, as in TensorRT-LLM."""


class PriorityBlocks(FreeBlocks):
    """Blocks without contents first, then those of the lowest priority, and among these the least
    recently used."""

    def __init__(self) -> None:
        super().__init__()
        self.priorities: dict[Hashable, int] = {}
        """By key, where they are not the default; changed by `set_priority`."""
        self._queues: dict[int, OrderedDict[int, None]] = {}
        """Free blocks by priority; -1: those without contents. No queue is empty."""

    def add(self, block: int, key: Hashable | None) -> None:
        # The value of a block is its queue.
        place = -1 if key is None else self.priorities.get(key, DEFAULT)
        self[block] = place
        queue = self._queues.setdefault(place, OrderedDict())
        queue[block] = None
        if key is None:
            queue.move_to_end(block, last=False)

    def remove(self, block: int) -> None:
        place = self.pop(block)
        queue = self._queues[place]
        del queue[block]
        if not queue:
            del self._queues[place]

    def pop_next(self) -> int:
        block = next(iter(self._queues[min(self._queues)]))
        self.remove(block)
        return block

    def clear(self) -> None:
        self._queues.clear()
        super().clear()

    def set_priority(self, key: Hashable, priority: int | None, block: int | None) -> None:
        """Sets the priority of contents; None: the default. `block`: the one that has them, if
        any. A free block then counts as just used."""
        if priority is None:
            self.priorities.pop(key, None)
        else:
            self.priorities[key] = priority
        if block is not None and block in self:
            self.remove(block)
            self.add(block, key)
