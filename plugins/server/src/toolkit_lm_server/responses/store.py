"""Responses that later requests can name."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from toolkit_lm_server.kept import MOST_BYTES, Kept

Turns = list[list[dict[str, Any]]]
"""Items of a conversation, by turn: the input of a request, or the output of a response."""


class _KeptResponse(NamedTuple):
    turns: bytes
    response: bytes

    @property
    def size(self) -> int:
        return len(self.turns) + len(self.response)


class ResponseStore:
    """Keeps the latest responses in memory, each for the client that it answered. Threads may
    share it."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """`most`: the number of responses to keep. 0 keeps none."""
        self._kept: Kept[_KeptResponse] = Kept(most, most_bytes)

    @property
    def is_on(self) -> bool:
        return self._kept.is_on

    def add(self, response: dict[str, Any], turns: Turns, owner: str) -> None:
        """Keeps a response, in place of one with the same id. `turns`: the conversation before the
        response, without instructions."""
        kept = _KeptResponse(msgspec.json.encode(turns), msgspec.json.encode(response))
        self._kept.add(response["id"], kept, owner)

    def turns(self, name: str, owner: str) -> Turns | None:
        """The conversation before a response. None where the owner has no such response."""
        kept = self._kept.find(name, owner)
        return None if kept is None else msgspec.json.decode(kept.turns)

    def response(self, name: str, owner: str) -> bytes | None:
        """A response in JSON. None where the owner has no such response."""
        kept = self._kept.find(name, owner)
        return None if kept is None else kept.response

    def remove(self, name: str, owner: str) -> bool:
        """Forgets a response. Returns whether the owner had it."""
        return self._kept.remove(name, owner)
