"""Responses that later requests can name."""

from __future__ import annotations

from collections import Counter, OrderedDict
from threading import Lock
from typing import Any, NamedTuple

import msgspec

_MOST_BYTES = 2**28
"""Most bytes of all that is kept."""


Turns = list[list[dict[str, Any]]]
"""Items of a conversation, by turn: the input of a request, or the output of a response."""


class _Kept(NamedTuple):
    turns: bytes
    response: bytes

    @property
    def size(self) -> int:
        return len(self.turns) + len(self.response)


class ResponseStore:
    """Keeps the latest responses in memory, each for the client that it answered.

    Where there is no more room, the client with the most gives up its oldest. So no client pushes
    out what others keep. Threads may share it.
    """

    def __init__(self, most: int, most_bytes: int = _MOST_BYTES) -> None:
        """`most`: the number of responses to keep. 0 keeps none."""
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: Counter[str] = Counter()
        """Bytes that are kept, by owner."""
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}
        """Responses by owner, then by name, the oldest first."""
        self._lock = Lock()

    @property
    def is_on(self) -> bool:
        return self._most > 0

    def add(self, response: dict[str, Any], turns: Turns, owner: str) -> None:
        """Keeps a response, in place of one with the same id. `turns`: the conversation before the
        response, without instructions."""
        kept = _Kept(msgspec.json.encode(turns), msgspec.json.encode(response))
        with self._lock:
            if self._find(response["id"], owner) is not None:
                self._drop(owner, response["id"])
            self._kept.setdefault(owner, OrderedDict())[response["id"]] = kept
            self._sizes[owner] += kept.size
            while sum(map(len, self._kept.values())) > self._most:
                self._drop(max(self._kept, key=lambda name: len(self._kept[name])))
            while self._sizes.total() > self._most_bytes:
                self._drop(max(self._kept, key=self._sizes.__getitem__))

    def _drop(self, owner: str, name: str | None = None) -> None:
        """Forgets a response of an owner. `name` None: the oldest one."""
        kept = self._kept[owner]
        response = kept.popitem(last=False)[1] if name is None else kept.pop(name)
        self._sizes[owner] -= response.size
        if not kept:
            del self._kept[owner], self._sizes[owner]

    def turns(self, name: str, owner: str) -> Turns | None:
        """The conversation before a response. None where the owner has no such response."""
        kept = self._find(name, owner)
        return None if kept is None else msgspec.json.decode(kept.turns)

    def response(self, name: str, owner: str) -> bytes | None:
        """A response in JSON. None where the owner has no such response."""
        kept = self._find(name, owner)
        return None if kept is None else kept.response

    def remove(self, name: str, owner: str) -> bool:
        """Forgets a response. Returns whether the owner had it."""
        with self._lock:
            is_kept = self._find(name, owner) is not None
            if is_kept:
                self._drop(owner, name)
        return is_kept

    def _find(self, name: str, owner: str) -> _Kept | None:
        """The response of this name, for its owner alone. Others do not learn that it exists."""
        return self._kept[owner].get(name) if owner in self._kept else None
