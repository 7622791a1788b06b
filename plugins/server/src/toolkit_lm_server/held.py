"""A render server's knowledge of media items that engines elsewhere hold. It need not decode and
process them again."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from msgspec import structs
from toolkit_lm.renderer import MEDIA_OWNER, HeldFeature, Rendered

from toolkit_lm_server.caller import CALLER

_MOST_TOKENS = 2**22
"""Most tokens of all known items together: 16 MiB."""
_LEAST = 64
"""Fewest tokens that an item counts as."""


class _Facts(NamedTuple):
    token_ids: array[int]
    mask: list[bool] | None
    layout: dict[str, list[float]]
    num_bytes: int

    @property
    def size(self) -> int:
        return max(len(self.token_ids) * (1 if self.mask is None else 3), _LEAST)


class HeldElsewhere:
    """A FeatureLookup for requests that list the items which their engine holds. Thread-safe."""

    def __init__(self, most: int = _MOST_TOKENS) -> None:
        self._facts: OrderedDict[str, _Facts] = OrderedDict()
        """Facts of items that were rendered here, by identifier, the longest unused first. They are
        small, and hold none of the items' data."""
        self._most = most
        self._size = 0
        self._lock = threading.Lock()

    @contextmanager
    def of(self, held: Collection[str], owner: str = "") -> Iterator[None]:
        """Sets the items that the engine of one request holds, and the engine's tenant that asks
        it."""
        token = CALLER.set(structs.replace(CALLER.get(), held=frozenset(held)))
        own = MEDIA_OWNER.get()
        owned = MEDIA_OWNER.set(f"{own}\n{owner}" if owner else own)
        try:
            yield
        finally:
            MEDIA_OWNER.reset(owned)
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
        """The prompt to send to an engine, without the data that it holds. Remembers the facts of
        the prompt's items."""
        if not rendered.features:
            return rendered
        held = CALLER.get().held
        features = []
        for feature in rendered.features:
            if feature.data is not None:
                place = feature.mm_position
                tokens = rendered.token_ids[place.offset : place.end]
                num_bytes = sum(values.data.nbytes for values in feature.data.values())
                self._remember(
                    feature.mm_identifier,
                    tokens,
                    _Facts(array("i"), place.mask, feature.layout, num_bytes),
                )
                if feature.mm_identifier in held:
                    feature = structs.replace(feature, data=None)
            features.append(feature)
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
