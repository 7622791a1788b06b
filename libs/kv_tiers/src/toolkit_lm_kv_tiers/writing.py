"""SeenTwice: which blocks are worth writing. Needs no torch."""

from __future__ import annotations

from collections import OrderedDict

Key = tuple[int, bytes]
"""KV group and digest of a block."""

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


def _remember(keys: OrderedDict[Key, None], key: Key) -> None:
    keys[key] = None
    keys.move_to_end(key)
    if len(keys) > _MOST:
        keys.popitem(last=False)
