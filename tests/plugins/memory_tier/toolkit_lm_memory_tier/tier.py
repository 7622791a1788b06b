"""Which contents the dictionary has: the least recently used ones go first."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from toolkit_lm.kv import KVTier


class MemoryTier(KVTier):
    """The half in the scheduler."""

    def __init__(self, config, kv_cache, *, options):
        self.capacity = options.capacity
        self.held: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        self.gone: list[tuple[int, bytes]] = []
        self.num_loaded = 0

    def find(self, group: int, digests: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(lambda one: (group, one) in self.held, digests))

    def load(self, group: int, digests: Sequence[bytes]) -> None:
        self.num_loaded += len(digests)
        for digest in digests:
            self.held.move_to_end((group, digest))

    def failed(self, group: int, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self.held.pop((group, digest), None)
            self.gone.append((group, digest))

    def evicted(self, contents: Sequence[tuple[int, bytes]]) -> Sequence[tuple[int, bytes]]:
        new = [one for one in contents if one not in self.held][: self.capacity]
        self.held |= dict.fromkeys(new)
        while len(self.held) > self.capacity:
            self.gone.append(self.held.popitem(last=False)[0])
        return new

    def dropped(self) -> list[tuple[int, bytes]]:
        gone, self.gone = self.gone, []
        return gone

    def reset(self) -> None:
        self.gone += self.held
        self.held.clear()
