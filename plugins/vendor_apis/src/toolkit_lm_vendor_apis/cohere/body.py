"""Request body of /v2/chat, and its translation to chat completions."""

from __future__ import annotations

from typing import Any, Literal

from toolkit_lm.errors import RequestError
from toolkit_lm_server.errors import printable
from toolkit_lm_server.fields import Items
from toolkit_lm_server.json_body import ManyItems
from toolkit_lm_server.protocol import EngineBody, examples
from toolkit_lm_server.request_fields import COMMON, Verdicts, idle, refused, sampling_parameters

_SAME = (
    "model",
    "stream",
    "temperature",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "priority",
    "timeout",
    "cache_salt",
    "tools",
)
_OTHERS = {
    "k": "top_k",
    "p": "top_p",
    "stop_sequences": "stop",
    "max_tokens": "max_completion_tokens",
}
NAMES = {
    "thinking_token_budget": "thinking.token_budget",
    "chat_template_kwargs.enable_thinking": "thinking.type",
    **{theirs: ours for ours, theirs in _OTHERS.items()},
}
"""Names in Cohere's API, by field of chat completions."""
VERDICTS: Verdicts = {
    **COMMON,
    **sampling_parameters("Cohere's API has no such field: ask /v1/chat/completions"),
    **refused("put the texts into a message", "documents"),
    **idle("there are no citations", "citation_options"),
    **refused("write the rules into a message", "safety_mode", "CONTEXTUAL", "NONE", "OFF"),
    **refused("prompts go through the chat template: ask /v1/completions", "raw_prompting"),
    **refused("use messages", "message chat_history preamble"),
    **refused("there are no tools that run on the server", "connectors search_queries_only"),
}
"""Treatment of all other fields."""
_EXAMPLE = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
}


class CohereChatBody(EngineBody):
    """POST /v2/chat."""

    model_config = examples(_EXAMPLE, {**_EXAMPLE, "stream": True})

    messages: ManyItems[dict[str, Any]]
    """The conversation, the oldest message first."""
    stream: bool | None = None
    """The answer comes as server-sent events, as it is generated."""
    max_tokens: int | None = None
    stop_sequences: Items[str] | None = None
    """Texts that end the answer. They are not part of it."""
    temperature: float | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: int | None = None
    """The number of likeliest tokens to draw from: top_k. 0: all tokens."""
    p: float | None = None
    """The sum of probabilities to which tokens are drawn: top_p."""
    logprobs: bool | None = None
    """The answer has the log probabilities of its tokens."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call, as OpenAI has them."""
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    """"REQUIRED" has the model call a tool, "NONE" call none."""
    strict_tools: bool | None = None
    """Arguments of calls are of the tools' schemas."""
    response_format: dict[str, Any] | None = None
    """The form of the answer: {"type": "json_object", "schema": ...}."""
    thinking: dict[str, Any] | None = None
    """Whether and how long the model reasons: {"type": "enabled", "token_budget": 1024}."""

    verdicts = VERDICTS
    nested = {
        "thinking": (("type", "token_budget"), {}),
        "response_format": (("type", "schema", "json_schema"), {}),
    }

    def chat(self) -> dict[str, Any]:
        """The fields of a chat completion. Raises RequestError."""
        fields = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        fields |= {
            ours: value
            for name, ours in _OTHERS.items()
            if (value := getattr(self, name)) is not None
        }
        if self.k == 0:
            del fields["top_k"]
        fields["messages"] = [
            _message(message, f"messages[{index}]") for index, message in enumerate(self.messages)
        ]
        if self.logprobs:
            fields["logprobs"] = True
        if self.tools:
            fields["tools"] = [
                _tool(tool, f"tools[{index}]", self.strict_tools)
                for index, tool in enumerate(self.tools)
            ]
            fields |= (
                {"tool_choice": self.tool_choice.lower()} if self.tool_choice is not None else {}
            )
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.thinks}
        if (form := self._response_format()) is not None:
            fields["response_format"] = form
        return fields

    @property
    def thinks(self) -> bool:
        """Reasoning is not turned off."""
        kind: object = (self.thinking or {}).get("type")
        return kind != "disabled"

    def budget(self) -> Any:
        """Tokens of reasoning; None: as many as there are."""
        return (self.thinking or {}).get("token_budget") if self.thinks else None

    def _response_format(self) -> dict[str, Any] | None:
        match self.response_format or {"type": "text"}:
            case {"type": "text"}:
                return None
            case {"type": "json_object"} as form:
                schema = form.get("json_schema") or form.get("schema")
                if schema is None:
                    return {"type": "json_object"}
                return {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema, "strict": True},
                }
        raise RequestError(
            'response_format must be of type "text" or "json_object".', "response_format"
        )


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    made = {
        name: value
        for name, value in message.items()
        if name in ("role", "tool_calls", "tool_call_id") and value is not None
    }
    content = message.get("content")
    if isinstance(content, list):
        thoughts = [
            part for part in content if isinstance(part, dict) and part.get("type") == "thinking"
        ]
        parts = [
            _part(part, f"{where}.content[{index}]")
            for index, part in enumerate(content)
            if part not in thoughts
        ]
        if thoughts:
            made["reasoning_content"] = "".join(str(part.get("thinking", "")) for part in thoughts)
        content = (
            parts
            if any(part["type"] != "text" for part in parts)
            else "".join(part["text"] for part in parts)
        )
    # The model's plan before its calls is a text of its own.
    return {
        **made,
        "content": content if content or message.get("tool_plan") is None else message["tool_plan"],
    }


def _part(part: Any, where: str) -> dict[str, Any]:
    match part:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image_url", "image_url": dict() | str() as image}:
            return {
                "type": "image_url",
                "image_url": {"url": image} if isinstance(image, str) else image,
            }
        case {"type": "document", "document": document}:
            data = document.get("data") if isinstance(document, dict) else None
            content = data.get("text") if isinstance(data, dict) else data
            if isinstance(content, str):
                return {"type": "text", "text": content}
    kind = part.get("type") if isinstance(part, dict) else None
    raise RequestError(
        f"{where}: a part of type {printable(repr(kind))} must be a text, an image_url, or a "
        "document with a text.",
        "messages",
    )


def _tool(tool: dict[str, Any], where: str, strict: bool | None) -> dict[str, Any]:
    if tool.get("type", "function") != "function" or not isinstance(
        function := tool.get("function"), dict
    ):
        raise RequestError(f"{where}: a tool must be of type 'function', with a function.", "tools")
    return {"type": "function", "function": function | ({"strict": True} if strict else {})}
