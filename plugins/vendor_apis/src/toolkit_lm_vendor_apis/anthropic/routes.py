"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from toolkit_lm_server.answer_schemas import answers, streams
from toolkit_lm_server.answers import answer
from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.errors import ApiError, as_api_error, described, renamed
from toolkit_lm_server.event_stream import stream_of
from toolkit_lm_server.generation import are_large
from toolkit_lm_server.plugin_routes import OpenAIApi
from toolkit_lm_server.route import request_context

from toolkit_lm_vendor_apis.anthropic.body import NAMES, CountBody, MessagesBody
from toolkit_lm_vendor_apis.anthropic.errors import AnthropicError, error_body
from toolkit_lm_vendor_apis.anthropic.output import MessageEvents, Output
from toolkit_lm_vendor_apis.anthropic.schemas import AnthropicMessage, MessageEvent, TokenCount
from toolkit_lm_vendor_apis.route_kinds import route_kind


class Messages:
    """Conversations, as Anthropic has them."""

    def __init__(self, api: OpenAIApi) -> None:
        self._engines = api.engines
        self._chat = api.chat

    async def create(self, body: MessagesBody, request: Request) -> Response:
        """Answers a conversation."""
        # Anthropic's clients may not leave a budget out.
        budget = self._chat.budget(body.budget(), "thinking.budget_tokens", body.model)

        async def begin() -> ChatAnswer:
            try:
                return await self._chat.ask(body.chat() | budget, request_context(request), NAMES)
            except Exception as error:
                raise renamed(as_api_error(error), NAMES) from error

        def output(reply: ChatAnswer) -> Output:
            cache = self._engines[body.model].config.cache
            return Output(
                reply,
                body.model or self._engines[None].served_model_name,
                thinks=body.thinks,
                retention=body.retention(),
                block_size=None if cache.enable_prefix_caching is False else cache.block_size,
            )

        if body.stream:
            return await stream_of(begin(), lambda reply: output(reply).events(), MessageEvents)
        reply = await begin()
        choices = await reply.choices()
        return await answer(lambda: output(reply).whole(choices), is_large=are_large(choices))

    async def count_tokens(self, body: CountBody, request: Request) -> dict[str, Any]:
        """The tokens of a conversation's prompt."""
        try:
            return {"input_tokens": await self._chat.count(body.chat(), request_context(request))}
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error


def add_routes(router: APIRouter, api: OpenAIApi) -> None:
    """Adds the routes."""
    kind = route_kind(router, AnthropicError, _refusal)
    messages = Messages(api)
    limits = described(404, 429, 504, kind=AnthropicError)
    for path, handler, responses in (
        ("/v1/messages", messages.create, streams(AnthropicMessage, MessageEvent)),
        ("/v1/messages/count_tokens", messages.count_tokens, answers(TokenCount)),
    ):
        router.add_api_route(
            path,
            handler,
            methods=["POST"],
            response_model=None,
            responses=responses | limits,
            route_class_override=kind,
        )


def _refusal(error: ApiError) -> Response:
    return JSONResponse(error_body(error), error.status, error.headers)
