"""WritingTier and SeenTwice: which blocks are worth writing. Needs no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence

from toolkit_lm_kv_tiers.pricing import Key, PricedTier

_MOST = 2**18
"""Most blocks that are remembered, of each kind. The longest unseen are forgotten."""


class SeenTwice:
    """Blocks that two requests have had: computed twice, or computed and found."""

    def __init__(self) -> None:
        self._once: OrderedDict[Key, None] = OrderedDict()
        self._twice: OrderedDict[Key, None] = OrderedDict()

    def computed(self, key: Key) -> bool:
        """A block was computed. Returns whether it was seen before."""
        if key in self._once:
            self.found(key)
        if key in self._twice:
            self._twice.move_to_end(key)
            return True
        _remember(self._once, key)
        return False

    def found(self, key: Key) -> None:
        """A request has found a block that another one had computed."""
        self._once.pop(key, None)
        _remember(self._twice, key)

    def __contains__(self, key: Key) -> bool:
        return key in self._twice


class WritingTier(PricedTier):
    """The scheduler's half of a tier that outlives its engine: the blocks that steps have filled,
    all of them, or those that were seen twice."""

    _seen: SeenTwice | None = None
    """None: all blocks are written."""

    @property
    @abstractmethod
    def _writes(self) -> bool:
        """Whether blocks can be written at present."""

    @abstractmethod
    def holds(self, key: Key) -> bool:
        """Whether the tier is known to have a block."""

    @abstractmethod
    def _add(self, contents: Sequence[Key]) -> Sequence[Key]:
        """Holds these blocks, as far as there is room. Returns the new ones."""

    def evicted(self, contents: Sequence[Key]) -> Sequence[Key]:
        if self._seen is not None:
            contents = [key for key in contents if key in self._seen]
        return self._add(contents) if self._writes else ()

    def filled(self, contents: Sequence[Key]) -> Sequence[Key]:
        if not self._writes:
            return ()
        if self._seen is not None:
            seen = [key for key in contents if self._seen.computed(key)]
            self.counts.withheld_blocks += len(contents) - len(seen)
            contents = seen
        return self._add(contents)

    def hit(self, group: int, digest: bytes) -> None:
        if self._seen is not None:
            self._seen.found((group, digest))

    def wants(self, group: int, digest: bytes) -> bool:
        key = (group, digest)
        return self._seen is not None and self._writes and key in self._seen and not self.holds(key)


def _remember(keys: OrderedDict[Key, None], key: Key) -> None:
    keys[key] = None
    keys.move_to_end(key)
    if len(keys) > _MOST:
        keys.popitem(last=False)
