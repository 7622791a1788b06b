"""Conversations in OpenAI's shape become conversations of harmony."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from toolkit_lm.errors import RequestError, nearest
from toolkit_lm.prompts import Conversation

from toolkit_lm_renderer_harmony.bounds import TextBudget

_SETTINGS = "chat_template_kwargs"
_EFFORTS = ("low", "medium", "high")
_KNOWN = ("reasoning_effort", "model_identity", "conversation_start_date")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class Chat:
    """Reads one conversation of at most `max_chars` characters. Its methods raise RequestError."""

    def __init__(self, max_chars: int) -> None:
        self._budget = TextBudget("the conversation", max_chars)
        self._called: dict[str, str] = {}
        """Name of the called function, by id of the tool call."""

    def read(
        self, messages: Conversation, tools: Any, settings: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        """The messages of harmony: its own system message, the developer's with the tools, and the
        others."""
        if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
            raise RequestError("the conversation is empty: give at least one message.", "messages")
        rest = list(messages)
        instructions = None
        if isinstance(rest[0], Mapping) and rest[0].get("role") in ("system", "developer"):
            instructions = self._content(rest.pop(0))
        found = [_of("system", [self._system(settings)])]
        developer = {
            "type": "developer_content",
            **({"instructions": instructions} if instructions else {}),
            **self._tools(tools),
        }
        if len(developer) > 1:
            found.append(_of("developer", [developer]))
        for message in rest:
            found += self._message(message)
        return found

    def _system(self, settings: Any) -> dict[str, Any]:
        if settings is not None and not isinstance(settings, Mapping):
            raise RequestError(
                f"{_SETTINGS} must be a mapping, not a {type(settings).__name__}.", _SETTINGS
            )
        fields = dict(settings or {})
        for name, value in fields.items():
            if name not in _KNOWN:
                raise RequestError(
                    f"harmony has no chat template, and takes no {name!r:.100}. "
                    f"{nearest(str(name), _KNOWN)}",
                    _SETTINGS,
                )
            if not isinstance(value, str) or (name == "reasoning_effort" and value not in _EFFORTS):
                wanted = f"one of {', '.join(_EFFORTS)}" if name == "reasoning_effort" else "a text"
                raise RequestError(f"{name} must be {wanted}, not {value!r:.100}.", _SETTINGS)
            self._text(value, _SETTINGS)
        # The checkpoint's template shows today's date too.
        date = fields.pop("conversation_start_date", None) or datetime.now().strftime("%Y-%m-%d")
        effort = str(fields.pop("reasoning_effort", "medium")).capitalize()
        return {
            "type": "system_content",
            "reasoning_effort": effort,
            "conversation_start_date": date,
            **_SYSTEM,
            **fields,
        }

    def _tools(self, tools: Any) -> dict[str, Any]:
        if not tools:
            return {}
        if not isinstance(tools, list | tuple) or not all(
            isinstance(tool, Mapping) for tool in tools
        ):
            raise RequestError(
                "tools must be a list of mappings, each with 'type' and 'function'.", "tools"
            )
        functions = [tool.get("function") for tool in tools]
        if not all(
            isinstance(function, Mapping) and isinstance(function.get("name"), str)
            for function in functions
        ):
            raise RequestError("each of tools must have a 'function' with a 'name'.", "tools")
        plain = [
            self._plain(dict(function), "tools")
            for function in functions
            if isinstance(function, Mapping)
        ]
        if not all(isinstance(tool.get("parameters"), dict | None) for tool in plain):
            raise RequestError(
                "the 'parameters' of a function must be a mapping: a JSON schema.", "tools"
            )
        listed = [
            {
                "name": tool["name"],
                "description": str(tool.get("description") or ""),
                "parameters": tool.get("parameters"),
            }
            for tool in plain
        ]
        return {"tools": {"functions": {"name": "functions", "tools": listed}}}

    def _message(self, message: Any) -> list[dict[str, Any]]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in _ROLES:
            raise RequestError(
                f"a message must have a 'role': one of {', '.join(_ROLES)}, not {role!r:.100}.",
                "messages",
            )
        if role == "assistant":
            return self._answer(message)
        if role == "tool":
            name = message.get("name") or self._called.get(str(message.get("tool_call_id")))
            if not isinstance(name, str):
                raise RequestError(
                    "a message of role 'tool' must name a tool call of the conversation: "
                    "'tool_call_id'.",
                    "messages",
                )
            name = self._text(name if "." in name else f"functions.{name}", "messages")
            return [
                _of(
                    "tool",
                    [_part(self._content(message))],
                    name=name,
                    recipient="assistant",
                    channel="commentary",
                )
            ]
        if role == "user":
            return [_of("user", [_part(self._content(message))])]
        return [
            _of(
                "developer", [{"type": "developer_content", "instructions": self._content(message)}]
            )
        ]

    def _answer(self, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Messages for the assistant's reasoning, calls and answer."""
        found = []
        if thought := message.get("reasoning_content") or message.get("thinking"):
            found.append(
                _of("assistant", [_part(self._text(thought, "messages"))], channel="analysis")
            )
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list | tuple):
            raise RequestError("tool_calls must be a list.", "messages")
        for call in calls:
            function = call.get("function") if isinstance(call, Mapping) else None
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise RequestError(
                    "each of tool_calls must have a 'function' with a 'name'.", "messages"
                )
            name = self._text(function["name"], "messages")
            arguments = function.get("arguments") or "{}"
            self._called[str(call.get("id"))] = name
            text = self._text(
                arguments
                if isinstance(arguments, str)
                else json.dumps(self._plain(arguments, "messages")),
                "messages",
            )
            to = {"recipient": f"functions.{name}", "content_type": "<|constrain|>json"}
            found.append(_of("assistant", [_part(text)], channel="commentary", **to))
        if message.get("content") is not None or not found:
            found.append(_of("assistant", [_part(self._content(message))], channel="final"))
        return found

    def _content(self, message: Mapping[str, Any]) -> str:
        content = message.get("content")
        parts = (
            content if isinstance(content, list | tuple) else [{"type": "text", "text": content}]
        )
        texts = []
        for part in parts:
            if not isinstance(part, Mapping) or part.get("type", "text") != "text":
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise RequestError(
                    f"this renderer takes text only, not content of type {kind!r:.100}.", "messages"
                )
            texts.append(self._text(part.get("text"), "messages"))
        return "".join(texts)

    def _text(self, value: Any, param: str) -> str:
        if not isinstance(value, str):
            raise RequestError(
                "a message's content must be a text or a list of texts, not a "
                f"{type(value).__name__}.",
                param,
            )
        return self._budget.spend(value, param)

    def _plain(self, value: Any, param: str) -> Any:
        """A copy of JSON types only."""
        try:
            text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{param} must hold JSON values only: {error}.", param) from None
        return json.loads(self._text(text, param))


_SYSTEM = {
    "model_identity": "You are ChatGPT, a large language model trained by OpenAI.",
    "knowledge_cutoff": "2024-06",
    "channel_config": {
        "valid_channels": ["analysis", "commentary", "final"],
        "channel_required": True,
    },
}
"""Channel settings that the format prescribes for gpt-oss."""


def _of(role: str, content: list[dict[str, Any]], **more: str) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}
