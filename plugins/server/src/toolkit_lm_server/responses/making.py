"""A response that is made, whole, as a stream, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, NamedTuple

from fastapi import Response

from toolkit_lm_server.answers import answer
from toolkit_lm_server.chat import Chat, ChatAnswer
from toolkit_lm_server.errors import ApiError, as_api_error, renamed
from toolkit_lm_server.generation import ChoicePiece, are_large
from toolkit_lm_server.responses.body import NAMES, ResponsesBody
from toolkit_lm_server.responses.output import Output

Keep = Callable[[dict[str, Any]], None]
"""Keeps a response as it is now, where any is kept. Raises ApiError where its conversation has no
more room for it."""


class Dialogue(NamedTuple):
    """The conversation that a response answers, earlier turns included."""

    items: list[dict[str, Any]]
    """All items."""
    messages: list[dict[str, Any]]
    """The same, as messages of a chat."""
    num_own: int
    """Number of items that the request itself has, at the end."""


class Making:
    """The work on one response. Plugins that run tools override it."""

    def __init__(
        self,
        chat: Chat,
        body: ResponsesBody,
        dialogue: Dialogue,
        context: dict[str, str],
        output: Output,
        keep: Keep,
    ) -> None:
        """`context`: facts of the request for plugins that watch the engine."""
        self.chat = chat
        self.body = body
        self.dialogue = dialogue
        self.context = context
        self.output = output
        self.keep = keep

    async def begin(self) -> ChatAnswer:
        """Asks the model. Raises ApiError."""
        try:
            fields = self.body.chat([], self.dialogue.messages)
            return await self.chat.ask(fields, self.context, NAMES)
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error

    async def events(self, reply: ChatAnswer) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events of a stream. The response is kept at its end, which is a failure where it
        cannot be."""
        self.output.answer = reply
        async with aclosing(self.output.events()) as found:
            async for events in found:
                for event in events:
                    if event["type"] in ("response.completed", "response.incomplete"):
                        self.keep_last(event)
                yield events

    def keep_last(self, event: dict[str, Any]) -> None:
        """Keeps the response of a stream's last event. It becomes a failure where the response
        cannot be kept."""
        try:
            self.keep(event["response"])
        except ApiError as error:
            event["type"] = "response.failed"
            event["response"] = self.output.failed(error)

    async def whole(self) -> Response:
        """The answer with the whole response. Raises ApiError."""
        self.output.answer = await self.begin()
        choices = await self.output.answer.choices()
        is_large = self.body.tells_logprobs or are_large(choices)
        return await answer(lambda: self._made(choices), is_large=is_large)

    async def settle(self) -> None:
        """Makes the response, and keeps each of its states."""
        try:
            self.keep(self.output.state("in_progress"))
            self.output.answer = await self.begin()
            await asyncio.to_thread(self._made, await self.output.answer.choices())
        except asyncio.CancelledError:
            self.keep(self.output.state("cancelled"))
        except Exception as error:
            self.keep(self.output.failed(as_api_error(error)))

    def _made(self, choices: list[ChoicePiece]) -> dict[str, Any]:
        response = self.output.whole(choices)
        self.keep(response)
        return response
