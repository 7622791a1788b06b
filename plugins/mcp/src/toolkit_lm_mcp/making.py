"""A response whose tools run on MCP servers: the model is asked again after each of its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, cast

from fastapi import Response
from toolkit_lm.errors import RequestError
from toolkit_lm_server.answers import answer
from toolkit_lm_server.chat import ChatAnswer
from toolkit_lm_server.errors import ApiError, as_api_error, renamed
from toolkit_lm_server.event_stream import ToldError
from toolkit_lm_server.responses.body import NAMES
from toolkit_lm_server.responses.items import APPROVAL, chat_tools, messages_of
from toolkit_lm_server.responses.making import Making

from toolkit_lm_mcp import Options
from toolkit_lm_mcp.rounds import Rounds
from toolkit_lm_mcp.tools import Tools

Events = AsyncGenerator[list[dict[str, Any]], None]


class Source:
    """The sessions of a response with its servers, and the model's answer that is read."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.reply: ChatAnswer | None = None

    async def aclose(self) -> None:
        """Aborts the answer, and ends the sessions."""
        if self.reply is not None:
            await self.reply.aclose()
        await self.tools.aclose()


class McpMaking(Making):
    """The work on a response with tools of MCP servers."""

    options: Options

    async def begin(self) -> Source:  # type: ignore[override]
        """Connects to the servers, and makes the calls that the client has approved. Raises
        ApiError."""
        try:
            if self.body.enable_response_messages:
                raise RequestError(
                    "enable_response_messages is not supported with tools of MCP servers.",
                    "enable_response_messages",
                )
            source = Source(Tools(self.body.tools or (), self.options))
            self._approved(source.tools)
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error
        await source.tools.open()
        try:
            # A body that the model refuses is an error, and no stream. Calls come first otherwise.
            if not self._approved(source.tools):
                source.reply = await self._ask(source, [], self._first_choice())
        except BaseException:
            await source.aclose()
            raise
        return source

    async def _ask(
        self, source: Source, messages: Sequence[dict[str, Any]], choice: Any
    ) -> ChatAnswer:
        """Asks the model. `messages`: those after the request's. Raises ApiError."""
        try:
            body = self.body.model_copy(update={"tools": None, "tool_choice": None})
            fields = body.chat([], [*self.dialogue.messages, *messages])
            others = [tool for tool in self.body.tools or () if tool.get("type") != "mcp"]
            tools = [*chat_tools(others), *source.tools.functions]
            if tools:
                fields |= {"tools": tools, "tool_choice": source.tools.choice(choice) or "auto"}
            return await self.chat.ask({**fields, "stream": True}, self.context, NAMES)
        except Exception as error:
            raise renamed(as_api_error(error), NAMES) from error

    def _approved(self, tools: Tools) -> list[dict[str, Any]]:
        """The requests for approval that the request's own items approve, and that were not called
        yet. Raises RequestError for one of a server that the tools do not have."""
        items = self.dialogue.items
        requests = {item["id"]: item for item in items if item["type"] == "mcp_approval_request"}
        called = {item.get("approval_request_id") for item in items if item["type"] == "mcp_call"}
        found = []
        for item in items[len(items) - self.dialogue.num_own :]:
            if item["type"] != APPROVAL or not item["approve"]:
                continue
            request = requests[item["approval_request_id"]]
            if request["id"] in called:
                continue
            called.add(request["id"])
            if request.get("server_label") not in tools.servers:
                raise RequestError(
                    "input: a call is approved, and tools has no server with the server_label "
                    f"{str(request.get('server_label'))[:64]!r}.",
                    "input",
                )
            found.append(request)
        return found

    async def events(self, reply: Any) -> Events:
        """The events of a stream. The response is kept at its end."""
        source = cast("Source", reply)
        number = 0
        async with aclosing(source), aclosing(self._events(source)) as found:
            async for events in found:
                for event in events:
                    if event["type"] in ("response.completed", "response.incomplete"):
                        self.keep_last(event)
                yield [
                    {**event, "sequence_number": number + place}
                    for place, event in enumerate(events)
                ]
                number += len(events)

    async def _events(self, source: Source) -> Events:
        rounds = Rounds(self.output, source.tools, self._most_calls())
        yield rounds.begun()
        try:
            for server in source.tools.servers.values():
                if not self._is_listed(str(server.label)):
                    yield rounds.whole_item(server.list_item())
            for request in self._approved(source.tools):
                async with aclosing(rounds.approved(request)) as made:
                    async for events in made:
                        yield events
            choice = self._first_choice()
            while True:
                if source.reply is None:
                    messages = messages_of(rounds.called_items()) if rounds.items else []
                    source.reply = await self._ask(source, messages, choice)
                async with aclosing(rounds.read(self._output_of(source.reply))) as read:
                    async for events in read:
                        yield events
                if rounds.is_last:
                    break
                source.reply = None
                choice = "none" if rounds.calls_left <= 0 else _later(choice)
            yield [rounds.final()]
        except ToldError:
            raise
        except Exception as error:
            api_error = as_api_error(error)
            yield [rounds.failed(api_error)]
            raise ToldError(str(api_error)) from error

    def _output_of(self, reply: ChatAnswer) -> Any:
        """An output of its own for each answer of the model."""
        output = self.output.again()
        output.answer = reply
        return output

    def _first_choice(self) -> Any:
        return self.body.tool_choice if self._most_calls() > 0 else "none"

    def _most_calls(self) -> int:
        stated = self.body.max_tool_calls
        most = self.options.max_calls
        return most if stated is None else min(stated, most)

    def _is_listed(self, label: str) -> bool:
        """Whether an earlier response has told of the server's tools."""
        return any(
            item["type"] == "mcp_list_tools" and item.get("server_label") == label
            for item in self.dialogue.items
        )

    async def whole(self) -> Response:
        """The answer with the whole response. Raises ApiError."""
        source = await self.begin()
        response = await self._last(source)
        if (error := response["error"]) is not None:
            raise ApiError(500, error["message"], code=error["code"])
        return await answer(lambda: response)

    async def settle(self) -> None:
        """Makes the response, and keeps each of its states."""
        try:
            self.keep(self.output.state("in_progress"))
            response = await self._last(await self.begin())
            if response["status"] == "failed":
                self.keep(response)
        except asyncio.CancelledError:
            self.keep(self.output.state("cancelled"))
        except Exception as error:
            self.keep(self.output.failed(as_api_error(error)))

    async def _last(self, source: Source) -> dict[str, Any]:
        """The response at its end."""
        last: dict[str, Any] = {}
        async with aclosing(self.events(source)) as found:
            try:
                async for events in found:
                    last = events[-1] if events else last
            except ToldError:
                pass
        response: dict[str, Any] = last["response"]
        return response


def _later(choice: Any) -> Any:
    """The tool_choice after the first answer: a call that had to be made was made."""
    if choice == "required":
        return "auto"
    if isinstance(choice, Mapping):
        if choice.get("type") == "mcp":
            return "auto"
        if choice.get("mode") == "required":
            return {**choice, "mode": "auto"}
    return choice


def making_kind(options: Options) -> type[McpMaking]:
    """The kind of work with these options."""
    return type("McpMaking", (McpMaking,), {"options": options})
