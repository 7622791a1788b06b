"""Chat completions that are kept: `store` of a chat, and the routes that find them again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import APIRouter, Query, Request, Response

from toolkit_lm_server.answer_schemas import ChatCompletion, answers
from toolkit_lm_server.answers import answer
from toolkit_lm_server.client_metadata import Metadata, MetadataBody
from toolkit_lm_server.errors import ApiError, described, printable
from toolkit_lm_server.kept import MOST_BYTES, Kept
from toolkit_lm_server.pages import After, InOrder, Limit, PageEnds, page_of
from toolkit_lm_server.protocol import ChatBody
from toolkit_lm_server.route import caller_of
from toolkit_lm_server.schema_texts import Described, Open

_PATH = "/v1/chat/completions"
_METADATA = "metadata["
"""Beginning of the names of query parameters that select by metadata: metadata[name]=value."""
_OF_MODEL = "The model whose chats are listed."
OfModel = Annotated[str | None, Query(description=_OF_MODEL)]


class StoringChatBody(ChatBody):
    """The body of a chat on a server that keeps chats."""

    store: bool | None = None
    """The answer is kept, so that GET /v1/chat/completions/{completion_id} finds it."""
    metadata: Metadata | None = None
    """Values that are kept with the answer."""


class StoredChat(ChatCompletion):
    """A chat completion that is kept."""

    metadata: dict[str, str]
    """The client's values."""


class StoredChats(PageEnds):
    data: list[StoredChat]
    """The chats of the page."""


class StoredMessage(Open):
    """A message of the request, with its own fields."""

    id: str
    """The message's id."""
    role: str
    """The author of the message."""
    content: str | None
    """The text. null: there is none."""
    content_parts: list[dict[str, Any]] | None
    """The parts of a content that has any."""


class StoredMessages(PageEnds):
    data: list[StoredMessage]
    """The messages of the page."""


class DeletedChat(Described):
    id: str
    """The object's id."""
    object: Literal["chat.completion.deleted"]
    """The kind of object."""
    deleted: Literal[True]
    """The chat is gone."""


class _KeptChat(NamedTuple):
    completion: bytes
    """The answer in JSON, with its metadata."""
    messages: bytes
    """The request's messages in JSON."""

    @property
    def size(self) -> int:
        return len(self.completion) + len(self.messages)


class ChatStore:
    """Keeps the latest chats in memory, each for the client that it answered. Threads may share
    it."""

    def __init__(self, most: int, most_bytes: int = MOST_BYTES) -> None:
        """`most`: the number of chats to keep. 0 keeps none."""
        self._kept: Kept[_KeptChat] = Kept(most, most_bytes)

    @property
    def is_on(self) -> bool:
        return self._kept.is_on

    def add(self, completion: Mapping[str, Any], body: StoringChatBody, owner: str) -> None:
        """Keeps an answer."""
        kept = _KeptChat(
            msgspec.json.encode({**completion, "metadata": body.metadata or {}}),
            msgspec.json.encode(body.messages),
        )
        self._kept.add(completion["id"], kept, owner)

    def completion(self, name: str, owner: str) -> bytes:
        """An answer in JSON. Raises ApiError (404)."""
        return self._found(name, owner).completion

    def messages(self, name: str, owner: str) -> list[dict[str, Any]]:
        """The messages of a request. Raises ApiError (404)."""
        found: list[dict[str, Any]] = msgspec.json.decode(self._found(name, owner).messages)
        return found

    def of(self, owner: str) -> list[dict[str, Any]]:
        """An owner's answers, the oldest first. It takes a while where they are large."""
        return [msgspec.json.decode(kept.completion) for kept in self._kept.of(owner)]

    def set_metadata(self, name: str, metadata: dict[str, str], owner: str) -> bytes:
        """Replaces the metadata. Returns the answer in JSON. Raises ApiError (404)."""

        def changed(kept: _KeptChat) -> _KeptChat:
            completion = msgspec.json.decode(kept.completion)
            encoded = msgspec.json.encode({**completion, "metadata": metadata})
            return kept._replace(completion=encoded)

        if (found := self._kept.change(name, owner, changed)) is None:
            raise _unknown(name)
        return found.completion

    def remove(self, name: str, owner: str) -> None:
        """Forgets an answer. Raises ApiError (404)."""
        if not self._kept.remove(name, owner):
            raise _unknown(name)

    def _found(self, name: str, owner: str) -> _KeptChat:
        if (found := self._kept.find(name, owner)) is None:
            raise _unknown(name)
        return found


class Streamed:
    """Joins the chunks of a stream to the completion that they tell."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def read(self, chunks: Iterable[Mapping[str, Any]]) -> None:
        """Reads chunks of the stream."""
        for chunk in chunks:
            if not self._head:
                self._head = {
                    name: value
                    for name, value in chunk.items()
                    if name not in ("choices", "usage", "prompt_token_ids", "timings")
                }
            for choice in chunk["choices"]:
                self._read(choice)

    def _read(self, choice: Mapping[str, Any]) -> None:
        made = self._choices.setdefault(
            choice["index"],
            {"message": {"role": "assistant", "content": None}, "logprobs": None, "calls": {}},
        )
        message = made["message"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                for call in value:
                    _join_call(made["calls"].setdefault(call["index"], {}), call)
            elif isinstance(value, str) and name != "role":
                message[name] = (message.get(name) or "") + value
        if (logprobs := choice.get("logprobs")) is not None:
            made["logprobs"] = made["logprobs"] or {"content": [], "refusal": None}
            made["logprobs"]["content"] += logprobs["content"]
        for name in ("finish_reason", "stop_reason"):
            made[name] = choice.get(name) if choice.get(name) is not None else made.get(name)

    def completion(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer. `usage`: its token counts."""
        choices = []
        for index, made in sorted(self._choices.items()):
            calls = [call for _, call in sorted(made.pop("calls").items())]
            message = made["message"]
            if calls:
                message |= {"tool_calls": calls, "content": message["content"] or None}
            choices.append({"index": index, **made, "token_ids": None})
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
        }


def _join_call(call: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Adds a delta of a call: texts of the function go on, the rest comes once."""
    for name, value in delta.items():
        if isinstance(value, Mapping):
            inner = call.setdefault(name, {})
            for field, text in value.items():
                inner[field] = inner.get(field, "") + (text or "")
        elif name != "index" and value is not None:
            call[name] = value


class StoredChatRoutes:
    """Chats of clients. Each is known to its owner alone."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store

    async def list(
        self,
        request: Request,
        model: OfModel = None,
        limit: Limit = 20,
        after: After = None,
        order: InOrder = "asc",
    ) -> Response:
        """The client's chats that are kept. `metadata[name]=value` selects by metadata."""
        owner = caller_of(request).client
        wanted = {
            name.removeprefix(_METADATA).removesuffix("]"): value
            for name, value in request.query_params.items()
            if name.startswith(_METADATA)
        }

        def page() -> dict[str, Any]:
            found = [
                chat
                for chat in self._store.of(owner)
                if model in (None, chat["model"]) and wanted.items() <= chat["metadata"].items()
            ]
            return page_of(found, limit, after, order)

        return await answer(page)

    async def get(self, completion_id: str, request: Request) -> Response:
        """A chat completion that is kept."""
        found = self._store.completion(completion_id, caller_of(request).client)
        return Response(found, media_type="application/json")

    async def messages(
        self,
        completion_id: str,
        request: Request,
        limit: Limit = 20,
        after: After = None,
        order: InOrder = "asc",
    ) -> Response:
        """The messages that a kept chat completion answers."""
        found = self._store.messages(completion_id, caller_of(request).client)
        return await answer(lambda: page_of(_with_ids(found, completion_id), limit, after, order))

    async def update(self, completion_id: str, body: MetadataBody, request: Request) -> Response:
        """Replaces the metadata of a kept chat completion."""
        owner = caller_of(request).client
        found = self._store.set_metadata(completion_id, body.metadata, owner)
        return Response(found, media_type="application/json")

    async def delete(self, completion_id: str, request: Request) -> dict[str, Any]:
        """Forgets a chat completion."""
        self._store.remove(completion_id, caller_of(request).client)
        return {"id": completion_id, "object": "chat.completion.deleted", "deleted": True}


def _with_ids(messages: Sequence[Mapping[str, Any]], name: str) -> list[dict[str, Any]]:
    """The messages as routes list them: the content is a text, and parts are beside it."""
    found = []
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else None
        if parts is not None:
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            content = "".join(text for text in texts if isinstance(text, str)) or None
        ours = {"id": f"{name}-{index}", "content": content, "content_parts": parts}
        found.append({**message, **ours})
    return found


def _unknown(name: str) -> ApiError:
    message = (
        f"Chat completion with id {printable(name)!r} not found: only the latest with store true "
        "are kept, in memory."
    )
    return ApiError(404, message, param="completion_id", code="chat_completion_not_found")


def add_stored_chats(router: APIRouter, store: ChatStore) -> None:
    """Adds the routes."""
    handlers = StoredChatRoutes(store)
    of_id = f"{_PATH}/{{completion_id}}"
    for method, path, handler, made in (
        ("GET", _PATH, handlers.list, StoredChats),
        ("GET", of_id, handlers.get, StoredChat),
        ("POST", of_id, handlers.update, StoredChat),
        ("DELETE", of_id, handlers.delete, DeletedChat),
        ("GET", f"{of_id}/messages", handlers.messages, StoredMessages),
    ):
        missing = described(404) if path != _PATH else {}
        router.add_api_route(
            path, handler, methods=[method], response_model=None, responses=answers(made) | missing
        )
