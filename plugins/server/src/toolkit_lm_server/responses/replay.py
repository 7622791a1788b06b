"""Events of a response that is made already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_CALLS = {
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
"""The event and the field of a call's text, by the type of its item."""
HOSTED: dict[str, dict[str, Any]] = {
    "mcp_list_tools": {"tools": []},
    "mcp_call": {"status": "in_progress", "arguments": "", "output": None, "error": None},
    "mcp_approval_request": {},
}
"""Types of items of MCP servers, each with the fields that it has not at its beginning."""
_UNDER_WAY: dict[str, Any] = {
    "status": "in_progress",
    "output": [],
    "usage": None,
    "incomplete_details": None,
}


def replayed(response: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events that build a finished response, in the order of a stream. Each text comes as one
    delta. So the numbers of events are the same at each call, and differ from those of the stream
    that made the response."""
    begun = {**response, **_UNDER_WAY, "error": None}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        events += _item(item, index)
    events.append({"type": f"response.{response['status']}", "response": response})
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


def _item(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    place = {"output_index": index}
    if item["type"] in HOSTED:
        yield from hosted_events(item, index)
        return
    own = {"item_id": item["id"], **place}
    call = _CALLS.get(item["type"])
    empty: dict[str, Any] = {call[1]: ""} if call else {"content": []}
    yield {
        "type": "response.output_item.added",
        **place,
        "item": {**item, "status": "in_progress", **empty},
    }
    if call is not None:
        event, field = call
        text = item[field]
        name = {"name": item["name"]} if item["type"] == "function_call" else {}
        yield {"type": f"response.{event}.delta", **own, "delta": text}
        yield {"type": f"response.{event}.done", **own, **name, field: text}
    else:
        for number, part in enumerate(item["content"]):
            yield from _part(part, {**own, "content_index": number})
    yield {"type": "response.output_item.done", **place, "item": item}


def hosted_events(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """The events of a whole item of an MCP server's."""
    place = {"output_index": index}
    own = {"item_id": item["id"], **place}
    empty = HOSTED[item["type"]]
    yield {"type": "response.output_item.added", **place, "item": {**item, **empty}}
    if item["type"] == "mcp_list_tools":
        yield {"type": "response.mcp_list_tools.in_progress", **own}
        yield {"type": "response.mcp_list_tools.completed", **own}
    if item["type"] == "mcp_call":
        yield {"type": "response.mcp_call.in_progress", **own}
        text = item["arguments"]
        yield {"type": "response.mcp_call_arguments.delta", **own, "delta": text}
        yield {"type": "response.mcp_call_arguments.done", **own, "arguments": text}
        if item["status"] in ("completed", "failed"):
            yield {"type": f"response.mcp_call.{item['status']}", **own}
    yield {"type": "response.output_item.done", **place, "item": item}


def _part(part: Mapping[str, Any], place: dict[str, Any]) -> Iterator[dict[str, Any]]:
    event = f"response.{part['type']}"
    logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    nothing = {"text": "", **({"logprobs": []} if logprobs else {})}
    yield {"type": "response.content_part.added", **place, "part": {**part, **nothing}}
    yield {"type": f"{event}.delta", **place, "delta": part["text"], **logprobs}
    yield {"type": f"{event}.done", **place, "text": part["text"], **logprobs}
    yield {"type": "response.content_part.done", **place, "part": part}
