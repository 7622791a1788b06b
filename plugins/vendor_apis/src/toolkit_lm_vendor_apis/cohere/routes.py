"""POST /v2/chat. The server itself has Cohere's routes of vectors and ranks."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import ConfigDict
from toolkit_lm_server.answer_schemas import streams
from toolkit_lm_server.answers import answer
from toolkit_lm_server.chat import Chat, ChatAnswer
from toolkit_lm_server.errors import ApiError, as_api_error, described, renamed
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.generation import are_large
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import request_context
from toolkit_lm_server.schema_texts import Described

from toolkit_lm_vendor_apis.cohere.body import NAMES, CohereChatBody
from toolkit_lm_vendor_apis.cohere.output import ChatEvents, Output
from toolkit_lm_vendor_apis.route_kinds import route_kind


class CohereError(Described):
    """Body of an error."""

    message: str


class CohereMessage(Described):
    role: Literal["assistant"]
    content: list[dict[str, str]] = []
    tool_calls: list[dict[str, Any]] = []


class CohereUsage(Described):
    billed_units: dict[str, int]
    tokens: dict[str, int]
    cached_tokens: int


class CohereChat(Described):
    id: str
    message: CohereMessage
    finish_reason: Literal[
        "COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "TIMEOUT", "ERROR"
    ]
    usage: CohereUsage
    logprobs: list[dict[str, Any]] = []


class CohereEvent(Described):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str


class CohereChats:
    """Conversations, as Cohere has them."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    async def create(self, body: CohereChatBody, request: Request) -> Response:
        """Answers a conversation."""
        budget = self._chat.budget(body.budget(), "thinking.token_budget", body.model)

        async def begin() -> ChatAnswer:
            try:
                return await self._chat.ask(body.chat() | budget, request_context(request), NAMES)
            except Exception as error:
                raise renamed(as_api_error(error), NAMES) from error

        def output(reply: ChatAnswer) -> Output:
            return Output(reply, tells_logprobs=bool(body.logprobs))

        if body.stream:
            return await stream_of(begin(), lambda reply: output(reply).events(), ChatEvents)
        reply = await begin()
        choices = await reply.choices()
        return await answer(
            lambda: output(reply).whole(choices), is_large=bool(body.logprobs) or are_large(choices)
        )


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the route."""
    kind = route_kind(router, CohereError, _refusal)
    responses = streams(CohereChat, CohereEvent) | described(404, 429, 504, kind=CohereError)
    chats = CohereChats(api.chat)
    router.add_api_route(
        "/v2/chat",
        chats.create,
        methods=["POST"],
        response_model=None,
        responses=responses,
        route_class_override=kind,
    )


def _refusal(error: ApiError) -> Response:
    return JSONResponse({"message": error.body["error"]["message"]}, error.status, error.headers)
