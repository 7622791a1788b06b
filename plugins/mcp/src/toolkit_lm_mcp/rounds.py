"""The items and events of a response that the model makes in several answers."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.event_stream import ToldError
from toolkit_lm_server.responses.output import Output
from toolkit_lm_server.responses.replay import hosted_events

from toolkit_lm_mcp.tools import Tool, Tools

Events = AsyncGenerator[list[dict[str, Any]], None]
_ARGUMENTS = "response.function_call_arguments."
_ENDS = ("response.completed", "response.incomplete", "response.failed")


class Rounds:
    """Joins the model's answers to one response. Functions that are tools of MCP servers become
    calls of these, and are made once an answer is whole."""

    def __init__(self, output: Output, tools: Tools, most_calls: int) -> None:
        """`output`: that of the whole response."""
        self._output = output
        self._tools = tools
        self.calls_left = most_calls
        self.items: list[dict[str, Any]] = []
        """The items of the response so far."""
        self.is_last = False
        """The last answer called no tool that runs here: the response ends."""
        self._end: dict[str, Any] = {}
        self._usage: dict[str, Any] | None = None

    def begun(self) -> list[dict[str, Any]]:
        """The first events."""
        state = self._output.state("in_progress")
        return [
            {"type": "response.created", "response": state},
            {"type": "response.in_progress", "response": state},
        ]

    def whole_item(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        """Adds an item that is whole already. Returns its events."""
        self.items.append(item)
        return [*hosted_events(item, len(self.items) - 1)]

    async def approved(self, request: Mapping[str, Any]) -> Events:
        """Makes a call that the client has approved."""
        server = self._tools.servers[request["server_label"]]
        item = _call_item(request["server_label"], request["name"])
        item |= {"arguments": request["arguments"], "approval_request_id": request["id"]}
        self.items.append(item)
        index = len(self.items) - 1
        *first, _ = hosted_events(item, index)
        yield first
        self.calls_left -= 1
        item |= await server.call(item["name"], item["arguments"])
        yield _ended(item, index)

    async def read(self, output: Output) -> Events:
        """Reads an answer of the model, and makes its calls. Raises ToldError."""
        answer = _Answer(self, len(self.items))
        async with aclosing(output.events()) as found:
            try:
                async for events in found:
                    yield [mine for event in events for mine in answer.events(event)]
            except ToldError:
                yield [self._final("failed", answer.items(), error=answer.end["error"])]
                raise
        self.items += answer.items()
        self._add_usage(answer.end["usage"])
        self._end = answer.end
        is_whole = answer.end["status"] == "completed"
        for index, tool in answer.calls:
            item = self.items[index]
            if not is_whole:
                item["status"] = "incomplete"
            elif self.calls_left <= 0:
                text = "the limit of calls is reached"
                failure = {"type": "mcp_protocol_error", "code": 0, "message": text}
                item |= {"status": "failed", "error": failure}
            else:
                self.calls_left -= 1
                item |= await tool.server.call(tool.name, item["arguments"])
            yield _ended(item, index)
        self.is_last = not (is_whole and answer.calls) or answer.waits

    def called_items(self) -> list[dict[str, Any]]:
        """The items so far as the model reads them: tools have their functions' names."""
        aliases = {
            (tool.server.label, tool.name): alias for alias, tool in self._tools.by_alias.items()
        }
        return [
            {**item, "name": aliases.get((item["server_label"], item["name"]), item["name"])}
            if item["type"] == "mcp_call"
            else item
            for item in self.items
        ]

    def final(self) -> dict[str, Any]:
        """The last event."""
        details = self._end["incomplete_details"]
        return self._final(self._end["status"], self.items, incomplete_details=details)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a response that an error ended."""
        return self._final("failed", self.items, error=self._output.failed(error)["error"])

    def _final(self, status: str, items: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        if status == "failed":
            items = [*self.items, *(item for item in items if item not in self.items)]
        else:
            more["usage"] = self._usage
        response = {**self._output.state(status), "output": items, **more}
        return {"type": f"response.{status}", "response": response}

    def _add_usage(self, usage: dict[str, Any]) -> None:
        self._usage = usage if self._usage is None else _sum(self._usage, usage)

    def tool(self, name: str) -> Tool | None:
        """The tool of an MCP server that the function stands for."""
        return self._tools.by_alias.get(name)


class _Answer:
    """Translates the events of one answer."""

    def __init__(self, rounds: Rounds, first: int) -> None:
        """`first`: number of items before it."""
        self._rounds = rounds
        self._first = first
        self._hosted: dict[int, dict[str, Any]] = {}
        """Items of MCP servers, by their place in the response."""
        self._whole: dict[int, dict[str, Any]] = {}
        self.calls: list[tuple[int, Tool]] = []
        """Calls to make: the places of their items."""
        self.waits = False
        """The client makes a call, or approves one."""
        self.end: dict[str, Any] = {}
        """The response of this answer alone, at its end."""

    def items(self) -> list[dict[str, Any]]:
        """The items that are whole."""
        return [self._whole[index] for index in sorted(self._whole)]

    def events(self, event: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of the whole response that an event of this answer becomes."""
        kind = event["type"]
        if kind in _ENDS:
            self.end = event["response"]
            return []
        if "output_index" not in event:
            return []
        event = {name: value for name, value in event.items() if name != "sequence_number"}
        index = event["output_index"] = event["output_index"] + self._first
        if kind == "response.output_item.added":
            return self._added(event, index)
        if (item := self._hosted.get(index)) is None:
            if kind == "response.output_item.done":
                self._whole[index] = event["item"]
                self.waits |= event["item"]["type"] in ("function_call", "custom_tool_call")
            return [event]
        if kind == "response.output_item.done":
            return self._done(item, event["item"]["arguments"], index)
        if item["type"] == "mcp_call" and kind.startswith(_ARGUMENTS):
            last = kind.removeprefix(_ARGUMENTS)
            own = {name: value for name, value in event.items() if name != "name"}
            mine = {"type": f"response.mcp_call_arguments.{last}", "item_id": item["id"]}
            return [{**own, **mine}]
        return []

    def _added(self, event: dict[str, Any], index: int) -> list[dict[str, Any]]:
        item = event["item"]
        tool = self._rounds.tool(item["name"]) if item["type"] == "function_call" else None
        if tool is None:
            return [event]
        label = str(tool.server.label)
        if tool.needs_approval:
            self._hosted[index] = {
                "type": "mcp_approval_request",
                "id": f"mcpr_{uuid.uuid4().hex}",
                "server_label": label,
                "name": tool.name,
                "arguments": "",
            }
            return []
        item = self._hosted[index] = _call_item(label, tool.name)
        self.calls.append((index, tool))
        return [
            {**event, "item": {**item}},
            {"type": "response.mcp_call.in_progress", "item_id": item["id"], "output_index": index},
        ]

    def _done(self, item: dict[str, Any], arguments: str, index: int) -> list[dict[str, Any]]:
        item["arguments"] = arguments
        self._whole[index] = item
        if item["type"] == "mcp_call":
            return []
        self.waits = True
        return [*hosted_events(item, index)]


def _call_item(label: str, name: str) -> dict[str, Any]:
    return {
        "type": "mcp_call",
        "id": f"mcp_{uuid.uuid4().hex}",
        "status": "in_progress",
        "server_label": label,
        "name": name,
        "arguments": "",
        "output": None,
        "error": None,
        "approval_request_id": None,
    }


def _ended(item: dict[str, Any], index: int) -> list[dict[str, Any]]:
    """The events at the end of a call."""
    place = {"item_id": item["id"], "output_index": index}
    is_over = item["status"] in ("completed", "failed")
    done = {"type": "response.output_item.done", "output_index": index, "item": {**item}}
    return [{"type": f"response.mcp_call.{item['status']}", **place}, done] if is_over else [done]


def _sum(usage: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _sum(value, other[name]) if isinstance(value, dict) else value + other[name]
        for name, value in usage.items()
    }
