"""Conversations that responses read and continue."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from toolkit_lm_server.errors import ApiError, printable
from toolkit_lm_server.kept import MOST_BYTES, Kept

MOST_ITEMS = 10_000
"""Most items of a conversation."""
_OVERHEAD = 200
"""Bytes of an item or a conversation beside its JSON."""


class Conversation(NamedTuple):
    """A conversation as it is kept. Changes make another one."""

    id: str
    created_at: int
    """Seconds since 1970."""
    metadata: bytes
    """A mapping of texts, in JSON."""
    items: dict[str, bytes]
    """Items in JSON, by id, the oldest first. It is never changed."""
    size: int
    """Bytes of memory."""

    def shown(self) -> dict[str, Any]:
        """The conversation, as OpenAI's API shows it."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": msgspec.json.decode(self.metadata),
        }

    def read(self) -> list[dict[str, Any]]:
        """The items. It takes a while where they are large."""
        return [msgspec.json.decode(item) for item in self.items.values()]

    def with_items(self, items: Sequence[dict[str, Any]]) -> Conversation:
        """The conversation with more items at its end."""
        encoded = {item["id"]: msgspec.json.encode(item) for item in items}
        more = sum(len(item) + _OVERHEAD for item in encoded.values())
        return self._replace(items={**self.items, **encoded}, size=self.size + more)

    def without(self, name: str) -> Conversation:
        """The conversation without one of its items."""
        left = {other: item for other, item in self.items.items() if other != name}
        return self._replace(items=left, size=self.size - len(self.items[name]) - _OVERHEAD)

    def with_metadata(self, metadata: dict[str, str]) -> Conversation:
        """The conversation with other metadata."""
        encoded = msgspec.json.encode(metadata)
        size = self.size + len(encoded) - len(self.metadata)
        return self._replace(metadata=encoded, size=size)

    def check_room(self, items: Sequence[dict[str, Any]], field: str) -> None:
        """Raises ApiError (400) for items that do not fit. `field`: the request's field that has
        them."""
        if len(self.items) + len(items) > MOST_ITEMS:
            message = f"{field}: a conversation has at most {MOST_ITEMS:,} items. Begin another."
            raise ApiError(400, message, param=field)
        names = set(self.items)
        for item in items:
            if item["id"] in names:
                name = printable(item["id"])
                message = f"{field}: the conversation has an item with the id {name!r} already."
                raise ApiError(400, message, param=field)
            names.add(item["id"])


class ConversationStore:
    """Keeps the latest conversations in memory, each for the client that made it. One that is
    changed is the latest. Threads may share it."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """`most`: the number of conversations to keep. 0 keeps none."""
        self._kept: Kept[Conversation] = Kept(most, most_bytes)

    @property
    def is_on(self) -> bool:
        return self._kept.is_on

    def create(
        self, items: Sequence[dict[str, Any]], metadata: dict[str, str], owner: str
    ) -> Conversation:
        """Makes a conversation. Raises ApiError for items that have the same id."""
        name = f"conv_{uuid.uuid4().hex}"
        empty = Conversation(name, int(time.time()), b"{}", {}, _OVERHEAD)
        empty.check_room(items, "items")
        made = empty.with_metadata(metadata).with_items(items)
        self._kept.add(name, made, owner)
        return made

    def get(self, name: str, owner: str, param: str = "conversation_id") -> Conversation:
        """An owner's conversation. `param`: the field or part of the path that names it. Raises
        ApiError (404)."""
        if (found := self._kept.find(name, owner)) is None:
            raise unknown(name, param)
        return found

    def add_items(self, name: str, owner: str, items: Sequence[dict[str, Any]]) -> None:
        """Adds items at the end. Raises ApiError for an unknown conversation (404), and for items
        that do not fit (400)."""

        def added(conversation: Conversation) -> Conversation:
            conversation.check_room(items, "items")
            return conversation.with_items(items)

        if self._kept.change(name, owner, added) is None:
            raise unknown(name, "conversation_id")

    def extend(
        self,
        name: str,
        owner: str,
        items: Sequence[dict[str, Any]],
        output: Sequence[dict[str, Any]],
    ) -> None:
        """Adds a response, its input and its output, in one step. The conversation may be gone.
        `items`: its input, for which there was room when the response began.

        Raises ApiError (400), and adds nothing, where another response has taken that room or the
        id of an item since."""

        def extended(conversation: Conversation) -> Conversation:
            conversation.check_room(items, "input")
            return conversation.with_items([*items, *output])

        self._kept.change(name, owner, extended)

    def remove_item(self, name: str, item: str, owner: str) -> Conversation:
        """Forgets an item. Raises ApiError (404)."""

        def removed(conversation: Conversation) -> Conversation:
            if item not in conversation.items:
                raise unknown_item(item, name)
            return conversation.without(item)

        if (found := self._kept.change(name, owner, removed)) is None:
            raise unknown(name, "conversation_id")
        return found

    def set_metadata(self, name: str, metadata: dict[str, str], owner: str) -> Conversation:
        """Replaces the metadata. Raises ApiError (404)."""
        found = self._kept.change(name, owner, lambda kept: kept.with_metadata(metadata))
        if found is None:
            raise unknown(name, "conversation_id")
        return found

    def remove(self, name: str, owner: str) -> None:
        """Forgets a conversation. Raises ApiError (404)."""
        if not self._kept.remove(name, owner):
            raise unknown(name, "conversation_id")


def unknown(name: str, param: str) -> ApiError:
    """The error of a conversation that its client does not have."""
    message = (
        f"Conversation with id {printable(name)!r} not found: only the latest are kept, in memory."
    )
    return ApiError(404, message, param=param, code="conversation_not_found")


def unknown_item(name: str, conversation: str) -> ApiError:
    """The error of an item that a conversation does not have."""
    message = f"Conversation {printable(conversation)!r} has no item {printable(name)!r}."
    return ApiError(404, message, param="item_id", code="item_not_found")
