"""The routes of /v1/conversations: conversations that responses read and continue."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from toolkit_lm_server.answer_schemas import answers
from toolkit_lm_server.answers import answer
from toolkit_lm_server.client_metadata import MetadataBody
from toolkit_lm_server.errors import described
from toolkit_lm_server.pages import After, InOrder, Limit, page_of
from toolkit_lm_server.responses.conversation_schemas import (
    ConversationBody,
    ConversationObject,
    DeletedConversation,
    ItemsBody,
)
from toolkit_lm_server.responses.conversation_store import ConversationStore, unknown_item
from toolkit_lm_server.responses.items import items_of, listed, messages_of
from toolkit_lm_server.responses.schemas import InputItem, InputItems
from toolkit_lm_server.route import caller_of

_PATH = "/v1/conversations"


class Conversations:
    """Conversations of clients. Each is known to its owner alone."""

    def __init__(self, store: ConversationStore) -> None:
        self._store = store

    async def create(self, body: ConversationBody, request: Request) -> dict[str, Any]:
        """Begins a conversation, which may have items already."""
        owner = caller_of(request).client

        def made() -> dict[str, Any]:
            items = _checked(body.items) if body.items else []
            return self._store.create(items, body.metadata or {}, owner).shown()

        return await asyncio.to_thread(made)

    async def get(self, conversation_id: str, request: Request) -> dict[str, Any]:
        """A conversation, without its items."""
        return self._store.get(conversation_id, caller_of(request).client).shown()

    async def update(
        self, conversation_id: str, body: MetadataBody, request: Request
    ) -> dict[str, Any]:
        """Replaces the metadata of a conversation."""
        owner = caller_of(request).client
        return self._store.set_metadata(conversation_id, body.metadata, owner).shown()

    async def delete(self, conversation_id: str, request: Request) -> dict[str, Any]:
        """Forgets a conversation with its items. Responses that it has led to stay."""
        self._store.remove(conversation_id, caller_of(request).client)
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    async def items(
        self,
        conversation_id: str,
        request: Request,
        limit: Limit = 20,
        after: After = None,
        order: InOrder = "desc",
    ) -> Response:
        """The items of a conversation."""
        found = self._store.get(conversation_id, caller_of(request).client)
        return await answer(
            lambda: page_of([listed(item) for item in found.read()], limit, after, order)
        )

    async def add_items(self, conversation_id: str, body: ItemsBody, request: Request) -> Response:
        """Adds items at the end of a conversation."""
        owner = caller_of(request).client

        def added() -> dict[str, Any]:
            items = _checked(body.items)
            self._store.add_items(conversation_id, owner, items)
            return page_of([listed(item) for item in items], len(items), None, "asc")

        return await answer(added)

    async def item(self, conversation_id: str, item_id: str, request: Request) -> dict[str, Any]:
        """One item of a conversation."""
        found = self._store.get(conversation_id, caller_of(request).client)
        if item_id not in found.items:
            raise unknown_item(item_id, conversation_id)
        return listed(msgspec.json.decode(found.items[item_id]))

    async def delete_item(
        self, conversation_id: str, item_id: str, request: Request
    ) -> dict[str, Any]:
        """Forgets an item of a conversation, which comes back."""
        return self._store.remove_item(conversation_id, item_id, caller_of(request).client).shown()


def _checked(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as they are kept. Raises RequestError for one that no response could read."""
    messages_of(items, "items")
    return items_of(items)


def add_conversations(router: APIRouter, store: ConversationStore) -> None:
    """Adds the routes."""
    handlers = Conversations(store)
    of_id = f"{_PATH}/{{conversation_id}}"
    of_item = f"{of_id}/items/{{item_id}}"
    for method, path, handler, made in (
        ("POST", _PATH, handlers.create, ConversationObject),
        ("GET", of_id, handlers.get, ConversationObject),
        ("POST", of_id, handlers.update, ConversationObject),
        ("DELETE", of_id, handlers.delete, DeletedConversation),
        ("GET", f"{of_id}/items", handlers.items, InputItems),
        ("POST", f"{of_id}/items", handlers.add_items, InputItems),
        ("GET", of_item, handlers.item, InputItem),
        ("DELETE", of_item, handlers.delete_item, ConversationObject),
    ):
        missing = described(404) if path != _PATH else {}
        router.add_api_route(
            path, handler, methods=[method], response_model=None, responses=answers(made) | missing
        )
