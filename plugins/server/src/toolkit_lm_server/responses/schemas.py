"""Shapes of the answers of /v1/responses, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from toolkit_lm_server.answer_schemas import ContentLogprob
from toolkit_lm_server.pages import PageEnds
from toolkit_lm_server.responses.conversation_schemas import ConversationRef
from toolkit_lm_server.schema_texts import Described


class ResponsePart(Described):
    type: Literal["output_text", "reasoning_text"]
    """The kind of part."""
    text: str
    """The text."""
    annotations: list[Any] = []
    """Always empty."""
    logprobs: list[ContentLogprob] = []
    """Log probabilities of the tokens, where the request asks for them."""


class McpTool(Described):
    name: str
    """The tool's name."""
    description: str | None
    """What the tool does, as its server says."""
    input_schema: dict[str, Any]
    """JSON Schema of the arguments."""
    annotations: dict[str, Any] | None
    """Hints of the server about the tool."""


class McpError(Described):
    type: Literal["http_error", "mcp_protocol_error", "mcp_tool_execution_error"]
    """Who failed: the server, its protocol, or the tool."""
    code: int | None = None
    """The HTTP status, or the code of the protocol. Absent for a tool's failure."""
    message: str | None = None
    """The error in words. Absent for a tool's failure."""
    content: list[dict[str, Any]] | None = None
    """The tool's answer, where it failed."""


class ResponseItem(Described):
    """One item of the output: a message, reasoning, or a call."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "mcp_list_tools",
        "mcp_call",
        "mcp_approval_request",
    ]
    """The kind of item."""
    id: str
    """The object's id."""
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "completed"
    """Whether the item is whole. Lists of tools and requests for approval have none."""
    role: Literal["assistant"] = "assistant"
    """The author of a message."""
    content: list[ResponsePart] = []
    """The parts of a message, or of reasoning."""
    summary: list[Any] = []
    """Always empty: reasoning is told whole."""
    encrypted_content: None = None
    """Always null: reasoning is told in the open."""
    call_id: str = ""
    """The id that the result of a call names."""
    name: str = ""
    """The tool's name."""
    arguments: str = ""
    """JSON of the arguments of a function."""
    input: str = ""
    """The input of a custom tool."""
    server_label: str = ""
    """The name of the MCP server that has the tools, as the request calls it."""
    tools: list[McpTool] = []
    """The tools of an MCP server that the model may call."""
    output: str | None = None
    """The answer of a tool of an MCP server."""
    error: McpError | None = None
    """The error of such a call."""
    approval_request_id: str | None = None
    """The request for approval of such a call."""


class InputTokens(Described):
    cached_tokens: int
    """Tokens of the input that were found in the cache."""
    cache_write_tokens: int
    """Always 0."""


class OutputTokens(Described):
    reasoning_tokens: int
    """Tokens of reasoning."""


class ResponseUsage(Described):
    input_tokens: int
    """Tokens of the prompt."""
    input_tokens_details: InputTokens
    """Kinds of input tokens."""
    output_tokens: int
    """Tokens of the output."""
    output_tokens_details: OutputTokens
    """Kinds of output tokens."""
    total_tokens: int
    """Tokens of both."""


class ResponseFailure(Described):
    code: str
    """The kind of error."""
    message: str
    """The error in words."""


class Incomplete(Described):
    reason: str
    """The reason why the response is incomplete."""


class RawMessage(Described):
    type: Literal["raw_message_tokens"]
    """The kind of message."""
    message: str
    """The text, with special tokens."""
    tokens: list[int]
    """The token ids."""


class ResponseObject(Described):
    id: str
    """The object's id."""
    object: Literal["response"]
    """The kind of object."""
    created_at: int
    """Time at which it was made, in seconds since 1970."""
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    """How far the response is."""
    background: bool
    """The response is made in the background."""
    conversation: ConversationRef | None
    """The kept conversation that goes on."""
    error: ResponseFailure | None
    """The error that ended the response. null: none."""
    incomplete_details: Incomplete | None
    """The reason why the response is incomplete. null: it is whole."""
    instructions: str | None
    """The request's system message."""
    max_output_tokens: int | None
    """The request's limit of output tokens."""
    max_tool_calls: int | None
    """The request's limit of calls, without effect."""
    metadata: dict[str, str]
    """The request's values."""
    model: str
    """The model that answered, by its first name."""
    output: list[ResponseItem]
    """The items of the response: reasoning, messages, calls."""
    parallel_tool_calls: bool
    """The response may have several calls."""
    previous_response_id: str | None
    """The response whose conversation goes on."""
    reasoning: dict[str, Any]
    """The request's options of reasoning."""
    service_tier: Literal["default"]
    """The tier that served the request."""
    store: bool
    """The server keeps the response."""
    temperature: float | None
    """The request's temperature. null: the model's default."""
    text: dict[str, Any]
    """The request's format of texts."""
    tool_choice: str | dict[str, Any]
    """The request's choice of tools."""
    tools: list[dict[str, Any]]
    """The request's tools."""
    top_logprobs: int
    """Alternatives of each token in log probabilities."""
    top_p: float | None
    """The request's top_p. null: the model's default."""
    truncation: Literal["auto", "disabled"]
    """Whether a long prompt was to be cut."""
    usage: ResponseUsage | None
    """Numbers of tokens. null before the end."""
    input_messages: list[RawMessage] | None = None
    """The prompt as the model read it, where the request asks for it."""
    output_messages: list[RawMessage] | None = None
    """The output as the model drew it, where the request asks for it."""


class ResponseEvent(Described):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str
    """The kind of event."""
    sequence_number: int
    """The event's number in the stream, from 0 on."""


class InputItem(Described):
    """An item of an input, with the fields that the request gave it."""

    model_config = ConfigDict(extra="allow")

    type: str
    """The kind of item, such as "message" or "function_call_output"."""
    id: str
    """The item's id."""


class InputItems(PageEnds):
    data: list[InputItem]
    """The items of the page."""


class DeletedResponse(Described):
    id: str
    """The object's id."""
    object: Literal["response"]
    """The kind of object."""
    deleted: Literal[True]
    """The response is gone."""
