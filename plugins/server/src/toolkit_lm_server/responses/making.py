"""A response that is made, whole, as a stream, or in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Response

from toolkit_lm_server.answers import answer
from toolkit_lm_server.chat import Chat, ChatAnswer
from toolkit_lm_server.errors import as_api_error, renamed
from toolkit_lm_server.generation import ChoicePiece, are_large
from toolkit_lm_server.responses.body import NAMES, ResponsesBody
from toolkit_lm_server.responses.output import Output

Keep = Callable[[dict[str, Any]], None]
"""Keeps a response as it is now, where any is kept."""


class Making:
    """The work on one response."""

    def __init__(
        self,
        chat: Chat,
        body: ResponsesBody,
        messages: Sequence[dict[str, Any]],
        context: dict[str, str],
        output: Output,
        keep: Keep,
    ) -> None:
        """`messages`: the whole conversation. `context`: facts of the request for plugins that
        watch the engine."""
        self._chat = chat
        self._body = body
        self._messages = [*messages]
        self._context = context
        self._output = output
        self._keep = keep

    async def begin(self) -> ChatAnswer:
        """Asks the model. Raises ApiError."""
        try:
            fields = self._body.chat([], self._messages)
            return await self._chat.ask(fields, self._context, NAMES)
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error

    async def events(self, reply: ChatAnswer) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The events of a stream. The response is kept at its end."""
        self._output.answer = reply
        async with aclosing(self._output.events()) as found:
            async for events in found:
                for event in events:
                    if event["type"] in ("response.completed", "response.incomplete"):
                        self._keep(event["response"])
                yield events

    async def whole(self) -> Response:
        """The answer with the whole response. Raises ApiError."""
        self._output.answer = await self.begin()
        choices = await self._output.answer.choices()
        is_large = self._body.tells_logprobs or are_large(choices)
        return await answer(lambda: self._made(choices), is_large=is_large)

    async def settle(self) -> None:
        """Makes the response, and keeps each of its states."""
        try:
            self._keep(self._output.state("in_progress"))
            self._output.answer = await self.begin()
            await asyncio.to_thread(self._made, await self._output.answer.choices())
        except asyncio.CancelledError:
            self._keep(self._output.state("cancelled"))
        except Exception as error:
            self._keep(self._output.failed(as_api_error(error)))

    def _made(self, choices: list[ChoicePiece]) -> dict[str, Any]:
        response = self._output.whole(choices)
        self._keep(response)
        return response
