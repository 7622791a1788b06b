"""Chat: conversations become token ids, by the instruct tokenizer that a tekken.json names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.errors import RequestError, nearest
from toolkit_lm.prompts import Conversation

from toolkit_lm_renderer_mistral.plain import PlainCopy
from toolkit_lm_renderer_mistral.refusal import refusals

_EFFORT = "reasoning_effort"
_SETTINGS = "chat_template_kwargs"
"""The option that carries it: mistral-common has no chat template."""
_KEYS: Mapping[str, tuple[str, ...]] = {
    "system": ("content",),
    "developer": ("content",),
    "user": ("content",),
    "assistant": ("content", "tool_calls", "reasoning", "reasoning_content"),
    "tool": ("content", "tool_call_id", "name"),
}
"""Keys of a message by role. Other keys are ignored, like in chat templates."""
_PART_KEYS: Mapping[str, tuple[str, ...]] = {"text": ("text",), "thinking": ("thinking", "closed")}
"""Parts of a content. Those that name an image or a sound must not reach the library: it would
fetch what they name."""
_PARAMS = {"InvalidToolException": "tools", "InvalidToolSchemaException": "tools"}
"""Request parameter at fault, for errors that do not concern messages."""


class Chat:
    """Tokenizes conversations of at most `max_chars` characters. `tokenizer`: a
    MistralTokenizer."""

    def __init__(self, tokenizer: Any, max_chars: int) -> None:
        self._tokenizer = tokenizer
        self._max_chars = max_chars
        version = tokenizer.instruct_tokenizer.tokenizer.version
        self._version = str(version.value)
        self._takes_effort = bool(getattr(version, "supports_model_settings", False))

    def encode(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Any = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of a conversation. Raises RequestError."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        plain = PlainCopy(self._max_chars)
        chat = [_message(message, plain) for message in messages]
        if not chat:
            raise RequestError("the conversation is empty: give at least one message.", "messages")
        _check_end(chat[-1], add_generation_prompt, continue_final_message)
        settings = self._settings(chat_template_kwargs)
        converted = _tools(tools, plain)
        with refusals(
            "messages", _PARAMS | ({"InvalidRequestException": _SETTINGS} if settings else {})
        ):
            request = ChatCompletionRequest.from_openai(
                messages=chat, continue_final_message=continue_final_message, **settings
            )
            request.tools = converted
            return list(self._tokenizer.encode_chat_completion(request).tokens)

    def _settings(self, value: Any) -> dict[str, Any]:
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        if value is not None and not isinstance(value, Mapping):
            raise RequestError(
                f"{_SETTINGS} must be a mapping, not a {type(value).__name__}.", _SETTINGS
            )
        for name in value or {}:
            if name != _EFFORT:
                raise RequestError(
                    f"mistral-common has no chat template, and takes no {name!r:.100} for one. "
                    f"Known: {_EFFORT}.",
                    _SETTINGS,
                )
            if not self._takes_effort:
                raise RequestError(
                    f"a tokenizer of version {self._version} takes no {_EFFORT}: those from v15 "
                    "on do.",
                    _SETTINGS,
                )
        settings = dict(value or {})
        with refusals(_SETTINGS):
            # Without messages, so that what it says is about the settings.
            ChatCompletionRequest(messages=[], **settings)
        return settings


def _check_end(
    final: Mapping[str, Any], add_generation_prompt: bool | None, continue_final_message: bool
) -> None:
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
            "continue_final_message",
        )
    is_answer = final["role"] == "assistant"
    if continue_final_message and not (is_answer and final.get("content")):
        raise RequestError(
            "continue_final_message needs a final message of the assistant, with content.",
            "continue_final_message",
        )
    if add_generation_prompt is False and is_answer and not continue_final_message:
        raise RequestError(
            "mistral-common renders no conversation that ends with an answer: give another "
            "message, or continue_final_message.",
            "add_generation_prompt",
        )


def _message(message: Any, plain: PlainCopy) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(
            "a message must be a mapping with 'role' and 'content', not a "
            f"{type(message).__name__}.",
            "messages",
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in _KEYS:
        known = nearest(role, _KEYS) if isinstance(role, str) else f"Known: {', '.join(_KEYS)}."
        raise RequestError(
            f"a message must have a 'role' that mistral-common knows, not {role!r:.100}. {known}",
            "messages",
        )
    found = {
        key: plain.copy(message[key], "messages")
        for key in _KEYS[role]
        if message.get(key) is not None
    }
    content = found.get("content")
    if isinstance(content, list):
        found["content"] = [_part(part) for part in content]
    elif content is None and role != "assistant":
        raise RequestError(f"a message of role {role!r} must have a 'content'.", "messages")
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            "a message's content must be a text or a list of parts, not a "
            f"{type(content).__name__}.",
            "messages",
        )
    return {"role": "system" if role == "developer" else role, **found}


def _part(part: Any) -> dict[str, Any]:
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or not isinstance(kind, str) or kind not in _PART_KEYS:
        raise RequestError(
            f"this renderer takes text only, not content of type {kind!r:.100}.", "messages"
        )
    found = {key: part[key] for key in _PART_KEYS[kind] if key in part}
    if not isinstance(found.get(kind), str):
        raise RequestError(
            f"a content part of type {kind!r} must have a {kind!r}, which is a text.", "messages"
        )
    return {"type": kind, **found}


def _tools(tools: Any, plain: PlainCopy) -> list[Any] | None:
    from mistral_common.protocol.instruct.tool_calls import Tool

    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError(
            "tools must be a list of mappings, each with 'type' and 'function'.", "tools"
        )
    with refusals("tools"):
        return [
            Tool.from_openai(_with_parameters(plain.copy(tool, "tools"))) for tool in tools
        ] or None


def _with_parameters(tool: Any) -> Any:
    """A tool whose function states its parameters, which OpenAI's clients may leave out: none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    stated = {name: value for name, value in function.items() if value is not None}
    return {**tool, "function": {"parameters": {"type": "object", "properties": {}}, **stated}}
