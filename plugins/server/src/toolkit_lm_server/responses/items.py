"""Translates items of a response's input to messages of a chat, and its tools to those of a
chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.errors import RequestError

from toolkit_lm_server.errors import printable

_IDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
"""Beginnings of ids, by the type of the item."""
_LONGEST_ID = 128
"""Most characters of an id that a client gives."""
APPROVAL = "mcp_approval_response"
"""Type of the item that approves or declines a call of a tool that a server runs."""
_SECRETS = ("authorization", "headers")
"""Fields of tools that are for the tool's server alone."""
_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def items_of(value: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The items of an input, as they are kept: each has an id and a type. Call `messages_of`
    first, which checks them."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    return [_kept(item) for item in value]


def _kept(item: Mapping[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    name = item.get("id")
    if not (isinstance(name, str) and 0 < len(name) <= _LONGEST_ID):
        name = f"{_IDS.get(kind, 'item')}_{uuid.uuid4().hex}"
    return {**item, "type": kind, "id": name}


def listed(item: Mapping[str, Any]) -> dict[str, Any]:
    """A kept item, as routes list it: the content of a message is a list of parts."""
    if item["type"] != "message":
        return {**item}
    content = item.get("content")
    if isinstance(content, str):
        is_output = item.get("role") == "assistant"
        more: dict[str, Any] = {"annotations": []} if is_output else {}
        kind = "output_text" if is_output else "input_text"
        content = [{"type": kind, "text": content, **more}]
    return {"status": "completed", **item, "content": content}


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a request as its answer shows them, without what is for tools' servers."""
    return [_shown_tool(tool) if tool.get("type") == "mcp" else {**tool} for tool in tools]


def _shown_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in tool.items() if name not in _SECRETS}
    if isinstance(url := tool.get("server_url"), str):
        shown["server_url"] = url.partition("?")[0]
    return shown


def messages_of(
    value: str | Sequence[Mapping[str, Any]],
    field: str = "input",
    approvals: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:
    """The messages of an input. `field`: the request's field that has it. `approvals`: all requests
    for approval of the conversation, by id; None: whether there are such is not checked.

    Raises RequestError, which names the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _add(messages, item, f"{field}[{index}]", approvals)
    if not value:
        raise RequestError(f"{field} is an empty list: give at least one item.", field)
    for message in messages:
        # Reasoning that nothing follows is of an answer that was cut, and what has no text says
        # nothing: templates read a content.
        if (
            message["role"] == "assistant"
            and message["content"] is None
            and "tool_calls" not in message
        ):
            message["content"] = ""
    return messages


def _add(
    messages: list[dict[str, Any]],
    item: Mapping[str, Any],
    where: str,
    approvals: Mapping[str, Mapping[str, Any]] | None,
) -> None:
    match item.get("type", "message"):
        case "message":
            content = _content(item.get("content"), where)
            if item.get("role") == "assistant":
                _assistant(messages, content=_joined(content))
            else:
                messages.append({"role": item.get("role"), "content": content})
        case "reasoning":
            # Only what was told: a summary stands in for reasoning that was not. What is encrypted
            # elsewhere is lost.
            if text := _text(item.get("content") or item.get("summary") or [], where):
                _assistant(messages, reasoning_content=text)
        case "function_call":
            function = {name: _str(item, name, where) for name in ("name", "arguments")}
            _assistant(
                messages,
                call={"id": _str(item, "call_id", where), "type": "function", "function": function},
            )
        case "custom_tool_call":
            custom = {name: _str(item, name, where) for name in ("name", "input")}
            _assistant(
                messages,
                call={"id": _str(item, "call_id", where), "type": "custom", "custom": custom},
            )
        case "function_call_output" | "custom_tool_call_output":
            content = _content(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": _str(item, "call_id", where), "content": content}
            )
        case "mcp_list_tools" | "mcp_approval_request":
            # The model is told of the tools, and of the calls that were made.
            pass
        case "mcp_call":
            result = _result(item.get("output"), item.get("error"))
            _hosted_call(messages, item, _str(item, "id", where), result, where)
        case "mcp_approval_response":
            _decision(messages, item, where, approvals)
        case kind:
            known = (
                "message, reasoning, function_call, function_call_output, custom_tool_call, "
                "custom_tool_call_output, mcp_list_tools, mcp_call, mcp_approval_request, "
                "mcp_approval_response"
            )
            raise RequestError(
                f"{where}: items of type {printable(repr(kind))} are not supported. Supported: "
                f"{known}.",
                "input",
            )


def _hosted_call(
    messages: list[dict[str, Any]], item: Mapping[str, Any], name: str, result: str, where: str
) -> None:
    """Adds a call of a tool that a server runs, with its result."""
    function = {name: _str(item, name, where) for name in ("name", "arguments")}
    _assistant(messages, call={"id": name, "type": "function", "function": function})
    messages.append({"role": "tool", "tool_call_id": name, "content": result})


def _result(output: Any, error: Any) -> str:
    """The result of a call as the model reads it."""
    if error is None:
        return output if isinstance(output, str) else ""
    text = error if isinstance(error, str) else json.dumps(error, ensure_ascii=False)
    return f"Error: {text}"


def _decision(
    messages: list[dict[str, Any]],
    item: Mapping[str, Any],
    where: str,
    approvals: Mapping[str, Mapping[str, Any]] | None,
) -> None:
    """Adds a call that the client has declined. One that it approves is an item of its own once it
    was made."""
    name = _str(item, "approval_request_id", where)
    if not isinstance(item.get("approve"), bool):
        raise RequestError(f"{where}: approve must be true or false.", "input")
    if approvals is None:
        return
    if (request := approvals.get(name)) is None:
        raise RequestError(
            f"{where}: the conversation has no mcp_approval_request with the id "
            f"{printable(name)!r}.",
            "input",
        )
    if not item["approve"]:
        reason = item.get("reason")
        why = f" {reason}" if isinstance(reason, str) and reason else ""
        _hosted_call(messages, request, name, f"The user declined this call.{why}", where)


def _assistant(
    messages: list[dict[str, Any]],
    *,
    content: Any = None,
    reasoning_content: str | None = None,
    call: dict[str, Any] | None = None,
) -> None:
    """Adds to the assistant's turn. Reasoning, a text and calls, in this order, are one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    begins = (
        last is None
        or reasoning_content is not None
        or (content is not None and (last["content"] is not None or "tool_calls" in last))
    )
    if begins:
        last = {"role": "assistant", "content": None}
        messages.append(last)
    assert last is not None
    if reasoning_content:
        last["reasoning_content"] = reasoning_content
    if content is not None:
        last["content"] = content
    if call is not None:
        last.setdefault("tool_calls", []).append(call)


def _content(content: Any, where: str) -> str | list[dict[str, Any]]:
    """The content of a chat's message: a text, or parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: the content must be a text or a list of parts.", "input")
    return [_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise RequestError(f"{where} must be an object with a type.", "input")
    match part.get("type"):
        case kind if kind in _TEXTS:
            return {"type": "text", "text": _str(part, "text", where)}
        case "refusal":
            return {"type": "text", "text": _str(part, "refusal", where)}
        case "input_image" if part.get("image_url") is not None:
            detail = {} if part.get("detail") is None else {"detail": part["detail"]}
            return {
                "type": "image_url",
                "image_url": {"url": _str(part, "image_url", where), **detail},
            }
        case "input_file" if part.get("file_data") is not None:
            return {
                "type": "file",
                "file": {
                    name: part[name]
                    for name in ("file_data", "filename")
                    if part.get(name) is not None
                },
            }
        case "input_image" | "input_file":
            raise RequestError(
                f"{where}: this server has no uploaded files: send the data, as image_url or "
                "file_data.",
                "input",
            )
        case kind:
            # The item is passed on unchanged: the renderer knows what the model reads.
            if not isinstance(kind, str):
                raise RequestError(f"{where} must be an object with a type.", "input")
            return part


def _joined(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """The content with its texts joined to one."""
    if isinstance(content, list) and all(part["type"] == "text" for part in content):
        return "".join(part["text"] for part in content)
    return content


def _text(parts: Any, where: str) -> str:
    if not isinstance(parts, list):
        raise RequestError(f"{where}: the content must be a list of parts.", "input")
    return "".join(_str(part if isinstance(part, dict) else {}, "text", where) for part in parts)


def _str(item: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise RequestError(f"{where}: {name} must be a text.", "input")
    return value


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools of a chat: functions and others have their fields in a mapping there."""
    return [_chat_tool(tool) for tool in tools]


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return {**tool}
    # OpenAI takes them for strict where nothing is said; parameters without a schema cannot be.
    function = {
        name: tool[name]
        for name in ("name", "description", "parameters", "strict")
        if tool.get(name) is not None
    }
    return {"type": "function", "function": function}
