"""Conversations with tools for models whose chat template knows none: functions, calls and results
are told in the text of messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = (
    "You can call functions. To call one, answer with nothing but a JSON object with its name and "
    'its arguments: {"name": ..., "parameters": {...}}.'
)
_SEVERAL = 'To call several, write one object after the other, with "; " between them.'


def with_tool_texts(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> list[dict[str, Any]]:
    """The messages without tools of any kind. `tools` are told in the system message, or else in
    the first message of the user: not every template takes a system message."""
    conversation = _without_calls(messages)
    if not tools:
        return conversation
    functions = [
        {
            name: function[name]
            for name in ("name", "description", "parameters")
            if function.get(name) is not None
        }
        for function in (tool["function"] for tool in tools)
    ]
    lines = [
        f"{_INTRODUCTION} {_SEVERAL}" if parallel else _INTRODUCTION,
        "The functions:",
        *(json.dumps(function, ensure_ascii=False) for function in functions),
    ]
    text = "\n".join(lines)
    for index, message in enumerate(conversation):
        if message.get("role") in ("system", "developer"):
            conversation[index] = {**message, "content": _joined(message.get("content"), text)}
            return conversation
    for index, message in enumerate(conversation):
        if message.get("role") == "user":
            conversation[index] = {**message, "content": _joined(text, message.get("content"))}
            return conversation
    return [{"role": "user", "content": text}, *conversation]


def _without_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, with calls in the words in which the model is asked for them, and results as
    the user's. Messages of the user that follow each other are one."""
    conversation: list[dict[str, Any]] = []
    names: dict[Any, Any] = {}
    joins = False
    for message in messages:
        made = message
        is_result = isinstance(message, Mapping) and message.get("role") == "tool"
        if is_result:
            name = names.get(message.get("tool_call_id"), "a function")
            content = _joined(f"The result of {name}:", message.get("content"))
            made = {"role": "user", "content": content}
        elif isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list):
            made = _told_calls(message, names)
        if (
            conversation
            and (is_result or joins)
            and isinstance(made, Mapping)
            and made.get("role") == conversation[-1].get("role") == "user"
        ):
            conversation[-1] = {
                **conversation[-1],
                "content": _joined(conversation[-1].get("content"), made.get("content")),
            }
        else:
            conversation.append(made)
        joins = is_result
    return conversation


def _told_calls(message: Mapping[str, Any], names: dict[Any, Any]) -> dict[str, Any]:
    """A message whose calls are text. `names` gets those of functions, by the calls' ids."""
    written = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return dict(message)
        name = function.get("name")
        names[call.get("id")] = name
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        written.append(f'{{"name": {json.dumps(name)}, "parameters": {arguments or "{}"}}}')
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": _joined(message.get("content"), "; ".join(written))}


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one, each a text or a list of parts."""
    if not first or not second:
        return first or second or ""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]
