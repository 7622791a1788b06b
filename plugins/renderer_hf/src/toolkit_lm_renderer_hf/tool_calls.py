"""Tool calls of messages, in the form that a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

_NAME = "probe-of-calls"


def with_calls(message: Mapping[str, Any], *, as_text: bool) -> Mapping[str, Any]:
    """A message whose calls have their arguments as mappings, or `as_text`; and a content, though clients give none beside calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple) or not calls:
        return message
    content = message.get("content")
    return {**message, "content": "" if content is None else content, "tool_calls": [_call(call, as_text) for call in calls]}


def takes_text(renders: Callable[[list[dict[str, Any]]], bool]) -> bool:
    """Whether a template takes arguments as text only. `renders` says whether it renders some messages."""

    def takes(arguments: Any) -> bool:
        call = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        return renders([{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}])

    return not takes({"a": 1}) and takes('{"a": 1}')


def _call(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if as_text and isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        arguments = _mapping(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _mapping(text: str) -> Any:
    """What a cut answer left stays a text."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    return found if isinstance(found, dict) else text
