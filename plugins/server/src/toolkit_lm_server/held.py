"""What a render server knows of the items that engines elsewhere hold: it need not decode and
process them again."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from msgspec import structs
from toolkit_lm.renderer import HeldFeature, Rendered

from toolkit_lm_server.caller import CALLER

_MOST_TOKENS = 2**22
"""Of all items together: 16 MiB."""
_LEAST = 64
"""Tokens that an item counts as at least."""


class _Facts(NamedTuple):
    token_ids: array[int]
    mask: list[bool] | None
    layout: dict[str, list[float]]
    num_bytes: int

    @property
    def size(self) -> int:
        return max(len(self.token_ids) * (1 if self.mask is None else 3), _LEAST)


class HeldElsewhere:
    """A FeatureLookup of requests that say themselves what their engine holds. Thread-safe."""

    def __init__(self, most: int = _MOST_TOKENS) -> None:
        self._facts: OrderedDict[str, _Facts] = OrderedDict()
        """By identifier, the longest unused first: small facts of items that were rendered here,
        and none of their data."""
        self._most = most
        self._size = 0
        self._lock = threading.Lock()

    @contextmanager
    def of(self, held: Collection[str]) -> Iterator[None]:
        """For one request, whose engine holds these."""
        token = CALLER.set(structs.replace(CALLER.get(), held=frozenset(held)))
        try:
            yield
        finally:
            CALLER.reset(token)

    def get(self, identifier: str) -> HeldFeature | None:
        if identifier not in CALLER.get().held:
            return None
        with self._lock:
            if (facts := self._facts.get(identifier)) is None:
                return None
            self._facts.move_to_end(identifier)
        return HeldFeature(list(facts.token_ids), facts.mask, facts.layout, facts.num_bytes)

    def held_keys(self, limit: int) -> list[str]:
        return sorted(CALLER.get().held)[:limit]

    def without_data(self, rendered: Rendered) -> Rendered:
        """What an engine is sent: without the data that it holds. The items are known from now
        on."""
        if not rendered.features:
            return rendered
        held = CALLER.get().held
        features = []
        for one in rendered.features:
            if one.data is not None:
                place = one.mm_position
                tokens = rendered.token_ids[place.offset : place.end]
                num_bytes = sum(values.data.nbytes for values in one.data.values())
                self._remember(
                    one.mm_identifier, tokens, _Facts(array("i"), place.mask, one.layout, num_bytes)
                )
                if one.mm_identifier in held:
                    one = structs.replace(one, data=None)
            features.append(one)
        return Rendered(rendered.token_ids, features)

    def _remember(self, identifier: str, tokens: Sequence[int], facts: _Facts) -> None:
        try:
            facts = facts._replace(token_ids=array("i", tokens))
        except OverflowError:
            return
        with self._lock:
            old = self._facts.pop(identifier, None)
            self._size += facts.size - (old.size if old is not None else 0)
            self._facts[identifier] = facts
            while self._size > self._most:
                _, gone = self._facts.popitem(last=False)
                self._size -= gone.size
