"""NamedMedia: items that callers have named, to be given by their names alone."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from threading import Lock
from typing import Any

from toolkit_lm.renderer import MEDIA_OWNER

from toolkit_lm_renderer_hf.media_items import Item

_MOST = 2**14
"""Most names. Each takes some 250 bytes."""


class NamedMedia:
    """The identifier of the item that a caller last gave with a name. None of the item's data is
    here. Thread-safe.

    Tenants (MEDIA_OWNER) have names of their own.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._identifiers: OrderedDict[bytes, str] = OrderedDict()
        """By digest of tenant, name and options, least recently used first."""
        self._lock = Lock()

    def add(self, item: Item, options: Mapping[str, Any], identifier: str) -> None:
        """Remembers the identifier of a named item, read with these processor options."""
        key = _key(item, options)
        with self._lock:
            self._identifiers[key] = identifier
            self._identifiers.move_to_end(key)
            if len(self._identifiers) > self._most:
                self._identifiers.popitem(last=False)

    def get(self, item: Item, options: Mapping[str, Any]) -> str | None:
        """Returns the identifier of the item that was given with this name and these options."""
        key = _key(item, options)
        with self._lock:
            if (found := self._identifiers.get(key)) is not None:
                self._identifiers.move_to_end(key)
            return found


def _key(item: Item, options: Mapping[str, Any]) -> bytes:
    named = [MEDIA_OWNER.get(), item.modality, item.uuid, options]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).digest()
