"""The routes of /v1/responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from toolkit_lm.errors import RequestError

from toolkit_lm_server.answer_schemas import answers, streams
from toolkit_lm_server.answers import answer
from toolkit_lm_server.chat import Chat
from toolkit_lm_server.engines import Engines
from toolkit_lm_server.errors import (
    ApiError,
    as_api_error,
    described,
    printable,
    renamed,
    validated,
)
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.pages import After, InOrder, Limit, page_of
from toolkit_lm_server.responses.background import Background
from toolkit_lm_server.responses.body import NAMES, ResponsesBody
from toolkit_lm_server.responses.conversation_store import ConversationStore
from toolkit_lm_server.responses.conversations import add_conversations
from toolkit_lm_server.responses.items import APPROVAL, items_of, listed, messages_of
from toolkit_lm_server.responses.making import Dialogue, Making
from toolkit_lm_server.responses.output import Output, ResponseEvents
from toolkit_lm_server.responses.replay import replayed
from toolkit_lm_server.responses.schemas import (
    DeletedResponse,
    InputItems,
    ResponseEvent,
    ResponseObject,
)
from toolkit_lm_server.responses.store import ResponseStore, Turns
from toolkit_lm_server.route import caller_of, request_context, with_body
from toolkit_lm_server.threads import aside

_PATH = "/v1/responses"
_STREAM = "The answer is the events of the response, once it is made."
_ENDED = ("completed", "incomplete")
"""States of responses whose output is kept in conversations."""
_AFTER = "The number of the last event that the client has: a stream begins with the next one."
_STORE_HINT = ". Leave it out, or ask the operator to keep them (max_stored_responses)."


class Responses:
    """Answers in the form of OpenAI's Responses API."""

    def __init__(
        self,
        engines: Engines,
        chat: Chat,
        store: ResponseStore,
        conversations: ConversationStore,
    ) -> None:
        self._engines = engines
        self._chat = chat
        self._store = store
        self._conversations = conversations
        self._background = Background()
        self.kinds: dict[str, type[Making]] = {}
        """Work on responses to requests with a tool of this type. Plugins add theirs."""

    async def create(self, body: ResponsesBody, request: Request) -> Response:
        """Answers an input: a text, or the items of a conversation."""
        owner = caller_of(request).client
        body.own_messages()
        items = items_of(body.input)
        turns = (
            self._earlier(body.previous_response_id, owner)
            if body.conversation_id is None
            else await self._conversation(body.conversation_id, items, owner)
        )
        turns.append(items)
        dialogue = _dialogue(turns)
        kind = self._kind(body, items)
        keeps = self._keeps(body)

        output = Output(body, body.model or self._engines[None].served_model_name, is_kept=keeps)

        def keep(response: dict[str, Any]) -> None:
            # First, because it may fail.
            if body.conversation_id is not None and response["status"] in _ENDED:
                self._conversations.extend(body.conversation_id, owner, items, response["output"])
            if keeps and (body.background or response["status"] != "failed"):
                self._store.add(response, turns, owner)

        making = kind(self._chat, body, dialogue, request_context(request), output, keep)
        if body.background:
            await self._check_background(body.chat([], dialogue.messages), keeps)
            self._background.start(output.id, making.settle)
            keep(queued := output.state("queued"))
            return await answer(lambda: queued, is_large=False)
        if body.stream:
            return await stream_of(making.begin(), making.events, ResponseEvents)
        return await making.whole()

    def _kind(self, body: ResponsesBody, items: list[dict[str, Any]]) -> type[Making]:
        """The kind of work that the request's tools need. Raises RequestError for an approval of a
        call that nothing could make."""
        for tool in body.tools or ():
            if isinstance(kind := tool.get("type"), str) and kind in self.kinds:
                return self.kinds[kind]
        for index, item in enumerate(items):
            if item["type"] == APPROVAL and item.get("approve"):
                raise RequestError(
                    f"input[{index}]: a call is approved, and tools has no tool of type 'mcp' that "
                    "this server runs.",
                    "input",
                )
        return Making

    async def _conversation(self, name: str, items: list[dict[str, Any]], owner: str) -> Turns:
        """The conversation that the request continues, as a turn. Raises ApiError. `items`: the
        request's."""
        if not self._conversations.is_on:
            message = (
                "conversation: this server keeps no conversations. Send the whole one as input, or "
                "ask the operator to keep them (max_stored_responses)."
            )
            raise ApiError(400, message, param="conversation", code="unsupported_parameter")
        found = self._conversations.get(name, owner, "conversation")
        found.check_room(items, "input")
        return [await asyncio.to_thread(found.read)] if found.items else []

    def _keeps(self, body: ResponsesBody) -> bool:
        """Whether the answer is kept. Raises RequestError where it must be kept and cannot be."""
        if body.store and not self._store.is_on:
            raise RequestError(
                f"store true is supported only by a server that keeps responses{_STORE_HINT}",
                "store",
            )
        return self._store.is_on and body.store is not False

    async def _check_background(self, chat: dict[str, Any], keeps: bool) -> None:
        """Raises ApiError or RequestError for an answer that cannot be made in the background."""
        try:
            await aside(validated, self._chat.body, chat)
        except RequestValidationError as error:
            raise renamed(as_api_error(error), NAMES) from error
        if not keeps:
            message = (
                "background can only be used when `store` is true, and by a server that keeps "
                "responses"
            )
            raise RequestError(f"{message}{_STORE_HINT}", "background")

    async def get(
        self,
        response_id: str,
        request: Request,
        stream: Annotated[bool, Query(description=_STREAM)] = False,
        starting_after: Annotated[int | None, Query(ge=0, description=_AFTER)] = None,
    ) -> Response:
        """A response that is kept, or its events."""
        if starting_after is not None and not stream:
            message = "starting_after is allowed only when stream is true."
            raise ApiError(400, message, param="starting_after")
        owner = caller_of(request).client
        found = self._found(response_id, owner)
        if not stream:
            return Response(found, media_type="application/json")
        first = 0 if starting_after is None else starting_after + 1

        async def begin() -> _Replay:
            await self._background.wait(response_id)
            return _Replay(msgspec.json.decode(self._found(response_id, owner)))

        return await stream_of(begin(), lambda replay: replay.events(first), ResponseEvents)

    def _found(self, name: str, owner: str) -> bytes:
        if (found := self._store.response(name, owner)) is None:
            raise _unknown(name, "response_id")
        return found

    async def input_items(
        self,
        response_id: str,
        request: Request,
        limit: Limit = 20,
        after: After = None,
        order: InOrder = "desc",
    ) -> Response:
        """The items that a response was made of: its request's, and those before them."""
        turns = self._store.turns(response_id, caller_of(request).client)
        if turns is None:
            raise _unknown(response_id, "response_id")
        items = [listed(item) for turn in turns for item in turn]
        return await answer(lambda: page_of(items, limit, after, order))

    async def delete(self, response_id: str, request: Request) -> dict[str, Any]:
        """Forgets a response. What is made in the background ends."""
        if self._store.response(response_id, caller_of(request).client) is not None:
            await self._background.stop(response_id)
        if not self._store.remove(response_id, caller_of(request).client):
            raise _unknown(response_id, "response_id")
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, response_id: str, request: Request) -> Response:
        """Ends a response that is made in the background. One that is made already stays as it
        is."""
        owner = caller_of(request).client
        if self._store.response(response_id, owner) is not None:
            await self._background.stop(response_id)
        if (found := self._store.response(response_id, owner)) is None:
            raise _unknown(response_id, "response_id")
        if msgspec.json.decode(found)["background"]:
            return Response(found, media_type="application/json")
        message = (
            "Cannot cancel a synchronous response. End the connection while it is made: that "
            "aborts it."
        )
        raise ApiError(400, message, param="response_id")

    def _earlier(self, name: str | None, owner: str) -> Turns:
        """The turns of the conversation that the request continues. Raises ApiError."""
        if name is None:
            return []
        if not self._store.is_on:
            message = (
                "previous_response_id: this server keeps no responses. Send the whole conversation "
                "as input, or ask the operator to keep them (max_stored_responses)."
            )
            raise ApiError(400, message, param="previous_response_id", code="unsupported_parameter")
        turns = self._store.turns(name, owner)
        found = self._store.response(name, owner)
        if turns is None or found is None:
            raise _unknown(name, "previous_response_id", 400)
        if name in self._background:
            message = (
                "previous_response_id: this response is being made in the background. Wait until "
                "it is completed."
            )
            raise ApiError(400, message, param="previous_response_id")
        output = msgspec.json.decode(found)["output"]
        return [*turns, output] if output else turns


class _Replay:
    """A response that is made already, as the source of a stream."""

    def __init__(self, response: dict[str, Any]) -> None:
        self._response = response

    async def events(self, first: int) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events from the number `first` on."""
        yield replayed(self._response)[first:]

    async def aclose(self) -> None:
        """Has no effect: nothing is under way."""


def _dialogue(turns: Turns) -> Dialogue:
    """The conversation of some turns, the last of which is the request's. Raises RequestError."""
    items = [item for turn in turns for item in turn]
    approvals = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
    messages = [message for turn in turns for message in messages_of(turn, approvals=approvals)]
    return Dialogue(items, messages, len(turns[-1]))


def _unknown(name: str, param: str, status: int = 404) -> ApiError:
    message = (
        f"Response with id {printable(name)!r} not found: only the latest are kept, in memory."
    )
    return ApiError(status, message, param=param, code=f"{param.removesuffix('_id')}_not_found")


def add_responses(
    router: APIRouter,
    engines: Engines,
    chat: Chat,
    body: type[ResponsesBody],
    options: ServerOptions,
) -> Responses:
    """Adds the routes of responses, with those of kept responses and conversations where some are
    kept. `body`: the body class with plugins' fields."""
    store = ResponseStore(options.max_stored_responses)
    conversations = ConversationStore(options.max_stored_responses)
    responses = Responses(engines, chat, store, conversations)
    schemas = streams(ResponseObject, ResponseEvent) | described(404, 429, 504)
    router.add_api_route(
        _PATH,
        with_body(responses.create, body),
        methods=["POST"],
        response_model=None,
        responses=schemas,
    )
    if store.is_on:
        _add_kept(router, responses)
        add_conversations(router, conversations)
    return responses


def _add_kept(router: APIRouter, responses: Responses) -> None:
    """Adds the routes of kept responses."""
    path = f"{_PATH}/{{response_id}}"
    unknown = described(404)
    for method, suffix, handler, found in (
        ("GET", "", responses.get, streams(ResponseObject, ResponseEvent) | unknown),
        ("DELETE", "", responses.delete, answers(DeletedResponse) | unknown),
        ("GET", "/input_items", responses.input_items, answers(InputItems) | unknown),
        ("POST", "/cancel", responses.cancel, answers(ResponseObject) | described(400, 404)),
    ):
        router.add_api_route(
            f"{path}{suffix}", handler, methods=[method], response_model=None, responses=found
        )
