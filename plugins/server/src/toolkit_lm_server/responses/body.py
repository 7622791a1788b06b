"""Request bodies of /v1/responses, and their translation to chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from toolkit_lm.errors import RequestError
from toolkit_lm.params import SAMPLING_PARAMS

from toolkit_lm_server.errors import printable
from toolkit_lm_server.fields import Items
from toolkit_lm_server.protocol import SamplingBody, examples
from toolkit_lm_server.request_fields import REASONING, RESPONSES, STREAM_OPTIONS, TEXT
from toolkit_lm_server.responses.conversation_schemas import ConversationRef
from toolkit_lm_server.responses.items import chat_tools, messages_of

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Names that fields of a chat completion have in a response."""
_ALSO = (
    "model",
    "stream",
    "n_predict",
    "truncation_side",
    "priority",
    "timeout",
    "cache_salt",
    "chat_template_kwargs",
    "parallel_tool_calls",
)
_LOGPROBS = "message.output_text.logprobs"
_OF_CHATS = (
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "timings",
    "return_hidden_states",
    "return_routed_experts",
    "kv_transfer_params",
)
"""Fields of chat completions that a response has no place for."""
_INCLUDED = (
    _LOGPROBS,
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
)
"""Values of `include` that are taken. Log probabilities come where asked for. The others come
anyway, like reasoning, or do not exist."""
_ECHOED = ("input", "instructions", "metadata", "reasoning", "text", "tool_choice", "tools")
"""Fields of a request that are kept, or come back with its answer."""


class ResponsesBody(SamplingBody):
    """The body of POST /v1/responses. It has the sampling parameters of chat completions, too."""

    model_config = examples(
        {"input": "What is the capital of France?", "max_output_tokens": 8},
        {
            "input": [{"role": "user", "content": "What is the capital of Italy?"}],
            "stream": True,
            "max_output_tokens": 8,
        },
    )

    verdicts = RESPONSES
    nested = {
        "text": (("format", "verbosity"), TEXT),
        "reasoning": (("effort",), REASONING),
        "stream_options": ((), STREAM_OPTIONS),
    }

    input: str | Items[dict[str, Any]]
    """The user's text, or items: messages, calls and their results, reasoning."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = None
    """Most output tokens, reasoning among them. null: as many as fit."""
    reasoning: dict[str, Any] | None = None
    """How much the model reasons: {"effort": ...}."""
    text: dict[str, Any] | None = None
    """The format of the text, {"format": ...}, as response_format of chat completions, and its
    "verbosity". The members of a JSON schema stand in the format directly."""
    tools: Items[dict[str, Any]] | None = None
    """Functions that the model may call, in the shape of this API."""
    tool_choice: str | dict[str, Any] | None = None
    """The tools to call: "none", "auto", "required", a function, or allowed_tools."""
    parallel_tool_calls: bool | None = None
    """False limits an answer to one call."""
    max_tool_calls: int | None = None
    """Most calls of tools that run on the server. There are none."""
    top_logprobs: int | None = None
    """Alternatives that log probabilities tell for each token."""
    include: Items[str] | None = None
    """What else the answer has, such as "message.output_text.logprobs"."""
    metadata: Annotated[dict[str, Any], Field(max_length=16)] | None = None
    """Values that come back with the answer."""
    store: bool | None = None
    """The answer is kept, where the server keeps any, so that previous_response_id can name it."""
    previous_response_id: str | None = None
    """The kept answer whose conversation goes on."""
    conversation: str | ConversationRef | None = None
    """The kept conversation that goes on, or its id: input and output are added to it."""
    truncation: Literal["auto", "disabled"] | None = None
    """"auto" cuts a prompt that is too long at its beginning."""
    background: bool | None = None
    """The answer is made in the background. GET tells its state."""
    enable_response_messages: bool = False
    """The answer has the prompt and the output as the model read and drew them, in text and
    tokens."""
    stream_options: dict[str, Any] | None = None  # type: ignore[assignment]
    """Options of a stream, without effect: nothing is obfuscated."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template."""

    def own_messages(self) -> list[dict[str, Any]]:
        """The input, as messages of a chat. Raises RequestError."""
        return messages_of(self.input)

    def chat(self, earlier: list[dict[str, Any]], own: list[dict[str, Any]]) -> dict[str, Any]:
        """The fields of a chat completion. `earlier`: the messages before its `own`. Raises
        RequestError for values that a chat completion cannot have."""
        self._check()
        names = (*SAMPLING_PARAMS, *self.plugin_fields, *_ALSO)
        fields = {name: value for name in names if (value := getattr(self, name, None)) is not None}
        fields["messages"] = _with_instructions(self.instructions, [*earlier, *own])
        if self.max_output_tokens is not None:
            fields["max_completion_tokens"] = self.max_output_tokens
        if self.truncation == "auto" and "truncate_prompt_tokens" not in fields:
            fields["truncate_prompt_tokens"] = -1
        if self.tells_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            fields["tools"] = chat_tools(self.tools)
            if self.tool_choice is not None:
                fields["tool_choice"] = self.tool_choice
        elif self.tool_choice not in (None, "none", "auto"):
            raise RequestError("tool_choice is allowed only with tools.", "tool_choice")
        if (effort := (self.reasoning or {}).get("effort")) is not None:
            fields["reasoning_effort"] = effort
        if (verbosity := (self.text or {}).get("verbosity")) is not None:
            fields["verbosity"] = verbosity
        if (form := self._response_format()) is not None:
            fields["response_format"] = form
        return fields

    @property
    def conversation_id(self) -> str | None:
        """The id of the kept conversation that goes on."""
        found = self.conversation
        return found.id if isinstance(found, ConversationRef) else found

    @property
    def tells_logprobs(self) -> bool:
        """Whether the answer has its tokens' log probabilities."""
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def _check(self) -> None:
        for name in _ECHOED:
            try:
                msgspec.json.encode(getattr(self, name))
            except UnicodeEncodeError as error:
                raise RequestError(
                    f"{name} is not a valid text: it has a lone surrogate.", name
                ) from error
        for name, value in (self.metadata or {}).items():
            if len(name) > 64 or not isinstance(value, str) or len(value) > 512:
                raise RequestError(
                    "metadata maps names of up to 64 characters to texts of up to 512.", "metadata"
                )
        for name in ("background", "enable_response_messages"):
            if getattr(self, name) and self.stream:
                raise RequestError(f"{name} is allowed only when stream is false.", name)
        if self.conversation is not None and self.previous_response_id is not None:
            raise RequestError(
                "conversation and previous_response_id are two ways to go on: give one of them.",
                "conversation",
            )
        if self.n not in (None, 1):
            raise RequestError("n must be 1: a response is one answer.", "n")
        for name in _OF_CHATS:
            if getattr(self, name, None) not in (None, False):
                raise RequestError(f"{name} is for chat completions.", name)
        if unknown := [name for name in self.include or () if name not in _INCLUDED]:
            known = ", ".join(_INCLUDED)
            raise RequestError(
                f"include: {printable(unknown[0])!r} is not one of {known}.", "include"
            )

    def _response_format(self) -> dict[str, Any] | None:
        form = (self.text or {}).get("format")
        if form is None:
            return None
        kind = form.get("type") if isinstance(form, dict) else None
        if not isinstance(kind, str):
            raise RequestError(
                'text.format must be {"type": "text"}, "json_object" or "json_schema".',
                "text.format",
            )
        if kind == "json_schema":
            return {
                "type": kind,
                "json_schema": {name: value for name, value in form.items() if name != "type"},
            }
        return None if kind == "text" else {"type": kind}


def _with_instructions(
    instructions: str | None, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The messages, with the instructions first. Chat templates take one system message at most, at
    the beginning."""
    if instructions is None:
        return messages
    if (
        messages
        and messages[0].get("role") in ("system", "developer")
        and isinstance(messages[0].get("content"), str)
    ):
        return [
            {"role": "system", "content": f"{instructions}\n\n{messages[0]['content']}"},
            *messages[1:],
        ]
    return [{"role": "system", "content": instructions}, *messages]
