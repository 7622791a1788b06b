"""Responses that later requests can name."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

_MOST_BYTES = 2**28
"""Of all that is kept."""


class _Kept(NamedTuple):
    owner: str
    messages: bytes
    response: bytes

    @property
    def size(self) -> int:
        return len(self.messages) + len(self.response)


class ResponseStore:
    """Keeps the latest, in memory, each for the client that it answered."""

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        """`most`: how many; 0 keeps none."""
        self._most = most
        self._most_bytes = most_bytes
        self._size = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def add(self, response: dict[str, Any], messages: list[dict[str, Any]], owner: str) -> None:
        """`messages`: the conversation, without instructions and with the answer."""
        kept = _Kept(owner, msgspec.json.encode(messages), msgspec.json.encode(response))
        self._kept[response["id"]] = kept
        self._size += kept.size
        while self._kept and (len(self._kept) > self._most or self._size > self._most_bytes):
            self._size -= self._kept.popitem(last=False)[1].size

    def messages(self, name: str, owner: str) -> list[dict[str, Any]] | None:
        """The conversation so far."""
        kept = self._find(name, owner)
        return None if kept is None else msgspec.json.decode(kept.messages)

    def response(self, name: str, owner: str) -> bytes | None:
        """In JSON."""
        kept = self._find(name, owner)
        return None if kept is None else kept.response

    def remove(self, name: str, owner: str) -> bool:
        """Whether there was one."""
        kept = self._find(name, owner)
        if kept is not None:
            del self._kept[name]
            self._size -= kept.size
        return kept is not None

    def _find(self, name: str, owner: str) -> _Kept | None:
        """Whoever else asks is not told that there is one."""
        kept = self._kept.get(name)
        return kept if kept is not None and kept.owner == owner else None
