"""Request bodies of /v1/messages, and their translation to chat completions."""

from __future__ import annotations

from typing import Any

from toolkit_lm.errors import RequestError
from toolkit_lm_server.errors import printable
from toolkit_lm_server.fields import Items
from toolkit_lm_server.json_body import ManyItems
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import (
    COMMON,
    Verdicts,
    idle,
    refused,
    reported,
    sampling_parameters,
)
from toolkit_lm_server.tools import drop_hosted

from toolkit_lm_vendor_apis.anthropic.cache_control import retention
from toolkit_lm_vendor_apis.arguments import dumps
from toolkit_lm_vendor_apis.images import image_part, url_part

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "chat_template_kwargs.enable_thinking": "thinking.type",
    "prompt_cache_retention": "cache_control",
}
"""Names in Anthropic's API, by field of chat completions."""
VERDICTS: Verdicts = {
    **COMMON,
    **sampling_parameters("Anthropic's API has no such field: ask /v1/chat/completions"),
    **idle("it is about accounts at Anthropic", "billing_policy betas"),
    **reported(
        "the whole conversation is read, and the answer has no report on caches",
        "context_management diagnostics",
    ),
    **refused("there are no containers, servers or tools here", "container mcp_servers"),
    **refused(
        "the server has one model, in one place", "inference_geo fallbacks fallback_credit_token"
    ),
    **refused("there is one speed", "speed", "standard"),
    **refused("send the whole conversation", "compaction thread"),
    **refused("use output_config.format", "output_format"),
    **refused("use max_tokens", "max_tokens_to_sample"),
}
"""Treatment of all other fields."""
_OF_DRAWING = "max_tokens stop_sequences stream temperature top_p top_k speed"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EXAMPLE = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


class PromptBody(EngineBody):
    """Fields that /v1/messages and /v1/messages/count_tokens share."""

    model_config = examples(_EXAMPLE)

    messages: ManyItems[dict[str, Any]]
    """The conversation, the oldest message first."""
    system: str | Items[dict[str, Any]] | None = None
    """The system message: a text, or blocks of text."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call, each with a name and an input_schema."""
    tool_choice: dict[str, Any] | None = None
    """The tools to call: {"type": "auto"}, "any", "none", or "tool" with a name."""
    thinking: dict[str, Any] | None = None
    """Whether and how long the model reasons: {"type": "enabled", "budget_tokens": 1024}."""
    output_config: dict[str, Any] | None = None
    """The form of the answer, `format`, and the effort of the reasoning, `effort`."""

    verdicts = VERDICTS
    nested = {
        "thinking": (
            ("type", "budget_tokens"),
            reported("reasoning is returned unchanged", "display"),
        ),
        "tool_choice": (("type", "name", "disable_parallel_tool_use"), {}),
        "output_config": (
            ("format", "effort"),
            refused("use thinking.budget_tokens", "task_budget"),
        ),
    }

    @property
    def thinks(self) -> bool:
        """The answer is to tell its reasoning."""
        kind: object = (self.thinking or {}).get("type", "disabled")
        return kind != "disabled"

    def chat(self) -> dict[str, Any]:
        """The fields of a chat completion. Raises RequestError."""
        messages = (
            []
            if self.system is None
            else [{"role": "system", "content": _texts(self.system, "system")}]
        )
        for index, message in enumerate(self.messages):
            messages += _messages(message, f"messages[{index}]")
        fields: dict[str, Any] = {"messages": messages}
        for name in ("model", "priority", "timeout", "cache_salt"):
            if (value := getattr(self, name)) is not None:
                fields[name] = value
        if (
            messages
            and messages[-1]["role"] == "assistant"
            and messages[-1].get("content")
            and "tool_calls" not in messages[-1]
        ):
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        if self.tools:
            fields |= {
                "tools": [
                    made
                    for index, tool in enumerate(self.tools)
                    if (made := _tool(tool, f"tools[{index}]")) is not None
                ],
                **self._tool_choice(),
            }
        return fields | self._output_config()

    def _tool_choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        alone = (
            {"parallel_tool_calls": False}
            if self.tool_choice.get("disable_parallel_tool_use")
            else {}
        )
        match self.tool_choice:
            case {"type": "tool", "name": str(name)}:
                return {"tool_choice": {"type": "function", "function": {"name": name}}, **alone}
            case {"type": "auto" | "any" | "none" as kind}:
                return {"tool_choice": _CHOICES[kind], **alone}
        raise RequestError(
            'tool_choice must be of type "auto", "any", "none", or "tool" with a name.',
            "tool_choice",
        )

    def _output_config(self) -> dict[str, Any]:
        config = self.output_config or {}
        fields = {}
        match config.get("format"):
            case None:
                pass
            case {"type": "json_schema", "schema": dict(schema)}:
                fields["response_format"] = {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema, "strict": True},
                }
            case _:
                raise RequestError(
                    'output_config.format must be {"type": "json_schema", "schema": ...}.',
                    "output_config.format",
                )
        if config.get("effort") is not None:
            fields["reasoning_effort"] = config["effort"]
        return fields


class CountBody(PromptBody):
    """POST /v1/messages/count_tokens."""

    verdicts = {
        **VERDICTS,
        **idle("no token is sampled", _OF_DRAWING),
        **idle("nothing is cached", "cache_control"),
    }


class MessagesBody(PromptBody):
    """POST /v1/messages."""

    model_config = examples(
        {**_EXAMPLE, "max_tokens": 8}, {**_EXAMPLE, "max_tokens": 8, "stream": True}
    )

    max_tokens: int
    stop_sequences: Items[str] | None = None
    """Texts that end the answer. They are not part of it."""
    stream: bool | None = None
    """The answer comes as server-sent events, as it is generated."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_control: dict[str, Any] | None = None
    """How long the prompt stays in the cache: {"type": "ephemeral", "ttl": "1h"}. Blocks may have
    it, too."""
    return_token_ids: bool = False
    """The answer has the token ids of its prompt and its output. Not in a stream."""

    def chat(self) -> dict[str, Any]:
        fields = super().chat() | {"max_completion_tokens": self.max_tokens}
        for name, theirs in (
            ("stop", "stop_sequences"),
            *((name, name) for name in ("stream", "temperature", "top_p", "top_k")),
        ):
            if (value := getattr(self, theirs)) is not None:
                fields[name] = value
        if (time := self.retention()) is not None:
            fields["prompt_cache_retention"] = time
        if self.return_token_ids:
            if self.stream:
                raise RequestError(
                    "return_token_ids is allowed only when stream is false.", "return_token_ids"
                )
            fields["return_token_ids"] = True
        return fields

    def retention(self) -> str | None:
        """The time for which the request asks to keep its prompt; None: it does not. Raises
        RequestError."""
        return retention(self.messages, self.system, self.tools, self.cache_control)

    def budget(self) -> Any:
        """Tokens of reasoning; None: as many as there are."""
        return (self.thinking or {}).get("budget_tokens") if self.thinks else None


def _messages(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """A message as those of a chat: each result of a tool is one of its own."""
    role = message.get("role")
    content = message.get("content")
    if not isinstance(role, str):
        raise RequestError(f"{where}: role must be a text.", "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"{where}: content must be a text or a list of blocks.", "messages")
    places = [f"{where}.content[{index}]" for index in range(len(content))]
    if role == "assistant":
        return [_assistant(content, places)]
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for block, place in zip(content, places, strict=True):
        if _kind(block, place) == "tool_result":
            result = _result(block.get("content") or "", place)
            results.append(
                {
                    "role": "tool",
                    "tool_call_id": _str(block, "tool_use_id", place),
                    "content": result,
                }
            )
        else:
            parts.append(_part(block, place))
    return [
        *results,
        *([{"role": role, "content": _joined(parts)}] if parts or not results else []),
    ]


def _result(content: Any, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: content must be a text or a list of blocks.", "messages")
    return _joined([_part(block, where) for block in content])


def _assistant(content: list[Any], places: list[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts = []
    thoughts = []
    calls = []
    for block, where in zip(content, places, strict=True):
        match _kind(block, where):
            case "text":
                texts.append(_str(block, "text", where))
            case "thinking":
                thoughts.append(_str(block, "thinking", where))
            case "redacted_thinking":
                pass
            case "tool_use":
                function = {
                    "name": _str(block, "name", where),
                    "arguments": dumps(block.get("input") or {}),
                }
                calls.append(
                    {"id": _str(block, "id", where), "type": "function", "function": function}
                )
            case kind:
                raise RequestError(
                    f"{where}: an assistant's block of type {printable(repr(kind))} is not "
                    "supported.",
                    "messages",
                )
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _part(block: Any, where: str) -> dict[str, Any]:
    """A block as a part of a chat's message."""
    match _kind(block, where), block.get("source"):
        case "text", _:
            return {"type": "text", "text": _str(block, "text", where)}
        case "image", {"type": "base64", "data": str(data)} as source:
            return image_part(data, str(source.get("media_type") or "image/png"))
        case "image", {"type": "url", "url": str(url)}:
            return url_part(url)
        case "document", {"type": "text", "data": str(text)}:
            return {"type": "text", "text": text}
        case kind, _:
            raise RequestError(
                f"{where}: a block of type {printable(repr(kind))} with this source is not "
                "supported.",
                "messages",
            )


def _texts(content: str | list[dict[str, Any]], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(
        _str(block, "text", f"{where}[{index}]") for index, block in enumerate(content)
    )


def _joined(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Texts as one."""
    return (
        parts
        if any(part["type"] != "text" for part in parts)
        else "\n".join(part["text"] for part in parts)
    )


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any] | None:
    """A tool of a chat; None for one that Anthropic runs, or that is known by its type alone."""
    if tool.get("type") not in (None, "custom"):
        drop_hosted(tool["type"], where)
        return None
    function = {
        "name": _str(tool, "name", where),
        "parameters": tool.get("input_schema") or {"type": "object"},
    }
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _kind(block: Any, where: str) -> Any:
    if not isinstance(block, dict):
        raise RequestError(f"{where} must be an object with a type.", "messages")
    return block.get("type")


def _str(block: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(value := block.get(name), str):
        raise RequestError(f"{where}: {name} must be a text.", where.partition("[")[0])
    return value
