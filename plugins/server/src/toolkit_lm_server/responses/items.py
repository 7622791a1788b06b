"""Translates items of a response's input to messages of a chat, and its tools to those of a
chat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.errors import RequestError

from toolkit_lm_server.errors import printable

_TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def messages_of(value: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages of an input. Raises RequestError, which names the item."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        _add(messages, item, f"input[{index}]")
    if not messages:
        raise RequestError("input is an empty list: give at least one item.", "input")
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


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
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
        case "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": _str(item, "call_id", where), "content": content}
            )
        case kind:
            known = "message, reasoning, function_call, function_call_output"
            raise RequestError(
                f"{where}: items of type {printable(repr(kind))} are not supported. Supported: "
                f"{known}.",
                "input",
            )


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
    """The tools of a chat. Raises RequestError for tools that run on OpenAI's servers."""
    found = []
    for index, tool in enumerate(tools):
        if tool.get("type") != "function":
            kind = printable(repr(tool.get("type")))
            raise RequestError(
                f"tools[{index}]: this server runs no tools of type {kind}: functions are what "
                "it takes.",
                "tools",
            )
        # OpenAI takes them for strict where nothing is said; parameters without a schema cannot be.
        function = {
            name: tool[name]
            for name in ("name", "description", "parameters", "strict")
            if tool.get(name) is not None
        }
        found.append({"type": "function", "function": function})
    return found


def chat_tool_choice(
    choice: str | Mapping[str, Any] | None, tools: list[dict[str, Any]]
) -> tuple[str | dict[str, Any] | None, list[dict[str, Any]]]:
    """A chat's tool_choice, and the tools that it leaves. Raises RequestError."""
    if choice is None or isinstance(choice, str):
        return choice, tools
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}, tools
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = [tool.get("name") for tool in allowed if isinstance(tool, dict)]
            return mode, [tool for tool in tools if tool["function"].get("name") in names]
    raise RequestError(
        'tool_choice must be "none", "auto", "required", a function or allowed_tools.',
        "tool_choice",
    )
