"""Shapes of the answers of /v1/responses, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from toolkit_lm_server.answer_schemas import ContentLogprob


class ResponsePart(BaseModel):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ResponseItem(BaseModel):
    """One item of the output: a message, reasoning, or a call."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[ResponsePart] = []
    summary: list[Any] = []
    encrypted_content: None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class InputTokens(BaseModel):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(BaseModel):
    reasoning_tokens: int


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(BaseModel):
    code: str
    message: str


class Incomplete(BaseModel):
    reason: str


class RawMessage(BaseModel):
    type: Literal["raw_message_tokens"]
    message: str
    tokens: list[int]


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseFailure | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: Literal["default"]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    input_messages: list[RawMessage] | None = None
    output_messages: list[RawMessage] | None = None


class ResponseEvent(BaseModel):
    """An event of a stream."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class DeletedResponse(BaseModel):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
