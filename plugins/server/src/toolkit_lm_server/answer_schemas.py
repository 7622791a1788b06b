"""Shapes of the answers, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from toolkit_lm.params import FinishReason

from toolkit_lm_server.errors import ErrorBody
from toolkit_lm_server.schema_texts import Described

ChatFinishReason = FinishReason | Literal["tool_calls"]


class CachedTokens(Described):
    cached_tokens: int
    """Tokens of the prompts that were found in the cache."""


class ReasoningTokens(Described):
    reasoning_tokens: int
    """Tokens of reasoning in all choices, without the marks around it."""


class Usage(Described):
    prompt_tokens: int
    """Tokens of the prompts."""
    completion_tokens: int
    """Tokens of the outputs."""
    total_tokens: int
    """Tokens of both."""
    prompt_tokens_details: CachedTokens
    """Kinds of prompt tokens."""
    completion_tokens_details: ReasoningTokens | None = None
    """Present in chats with a model whose reasoning is known."""
    draft_tokens: int | None = None
    """Verified drafts. Present with speculative decoding, if there were any."""
    accepted_draft_tokens: int | None = None
    """Drafts of these that were sampled."""
    drafters: dict[str, DrafterUsage] | None = None
    """Both by drafter."""


class DrafterUsage(Described):
    draft_tokens: int
    """Drafts of this drafter that were verified."""
    accepted_draft_tokens: int
    """Drafts of these that were sampled."""


class Head(Described):
    id: str
    """The object's id."""
    created: int
    """Time of the answer, in seconds since 1970."""
    model: str
    """The model that answered, by its first name."""


class Timings(Described):
    """Times of a request, in llama.cpp's shape."""

    cache_n: int
    """Tokens of the prompt that were found in the cache."""
    prompt_n: int
    """Tokens of the prompt that were computed."""
    prompt_ms: float
    """Milliseconds from the request's arrival to its first token."""
    prompt_per_token_ms: float
    """Milliseconds for each computed token of the prompt."""
    prompt_per_second: float
    """Computed tokens of the prompt per second."""
    predicted_n: int
    """Tokens of the answer."""
    predicted_ms: float
    """Milliseconds from the first token to the last."""
    predicted_per_token_ms: float
    """Milliseconds for each token after the first."""
    predicted_per_second: float
    """Tokens after the first per second."""


class GenerationHead(Head):
    system_fingerprint: str
    """Digest of the server's version, plugins and options. Answers with equal ones come from the
    same configuration."""
    timings: Timings | None = None
    """Times of the request, where it asks for timings."""
    kv_transfer_params: dict[str, Any] | None = None
    """The kv_transfer_params by which a peer fetches the prompt's KV blocks, where a request of one
    prompt asks for them."""


class ChatHead(GenerationHead):
    service_tier: Literal["default"] = "default"
    """The tier that served the request. Present where the request names one."""


class PromptLogprob(Described):
    logprob: float
    """The token's log probability."""
    rank: int
    """The token's place by probability, from 1 on."""
    decoded_token: str | None
    """The token's text."""


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None
"""Entries by token id, one mapping per token of the prompt. The first token's is null."""


class TokenLogprob(Described):
    token: str
    """The token's text."""
    logprob: float
    """The token's log probability."""
    bytes: list[int]
    """The text's bytes in UTF-8."""


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]
    """The likeliest tokens in its place."""


class ChatLogprobs(Described):
    content: list[ContentLogprob]
    """Log probabilities of the tokens of the text."""
    refusal: None
    """Always null."""


class FunctionCall(Described):
    name: str
    """The function's name."""
    arguments: str
    """JSON of an object, unless the answer was cut."""


class CustomCall(Described):
    name: str
    """Name of the custom tool."""
    input: str
    """Text that the tool is called with."""


class ToolCall(Described):
    id: str
    """The id that the message with the result names."""
    type: Literal["function", "custom"]
    """The kind of tool."""
    function: FunctionCall | None = None
    """The call of a function."""
    custom: CustomCall | None = None
    """The call of a custom tool, whose input is a text."""


class FunctionCallDelta(Described):
    name: str | None = None
    """The function's name, in the first part of a call."""
    arguments: str
    """The new text of the arguments' JSON."""


class ToolCallDelta(Described):
    """A part of a tool call. A call's first part has its id, type and name."""

    index: int
    """The call's place among the calls of the choice."""
    id: str | None = None
    """The call's id, in its first part."""
    type: Literal["function", "custom"] = "function"
    """The kind of tool."""
    function: FunctionCallDelta | None = None
    """What is new of the call of a function."""
    custom: CustomCall | None = None
    """What is new of the call of a custom tool."""


class Message(Described):
    role: Literal["assistant"]
    """The author of the message."""
    content: str | None
    """Text of the answer. null where it has tool calls only."""
    refusal: None
    """Always null."""
    reasoning_content: str | None = None
    """The answer's reasoning, where the model's is known."""
    reasoning: str | None = None
    """The answer's reasoning, by vLLM's newer name. It equals reasoning_content."""
    tool_calls: list[ToolCall] | None = None
    """Calls of tools. null: there are none."""


class WeightVersion(Described):
    """Output tokens [start, end), sampled with weights of one version; empty: the checkpoint's."""

    version: str
    """The version of the weights."""
    start: int
    """The first token that they sampled."""
    end: int
    """The token after the last that they sampled."""


class Choice(Described):
    index: int
    """The choice's place among the choices, from 0 on."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, where the request asks for them."""
    token_ids: list[int] | None = None
    """Token ids of the output, where the request asks for them."""
    weight_versions: list[WeightVersion] | None = None
    """Present where the weights have changed since the server's start."""
    hidden_states: str | None = None
    """Hidden states [tokens, layers, size] of a finished choice, where the request asks for them: a
    .npy file of float32, in base64."""
    routed_experts: str | None = None
    """Experts [tokens, layers, top-k] that the tokens of a finished choice went to, where the
    request asks for them: a .npy file of int16, in base64."""
    kv_transfer_params: dict[str, Any] | None = None
    """As in an answer to one prompt, where a request has several."""


class ChatChoice(Choice):
    message: Message
    """The answer."""
    logprobs: ChatLogprobs | None
    """Log probabilities of the tokens. null: the request asks for none."""
    finish_reason: ChatFinishReason
    """The end of the choice: "stop", "length" and others. null before it."""
    stop_reason: int | str | None
    """The stop text or token id that ended the choice. null: none did."""


class ChatCompletion(ChatHead):
    object: Literal["chat.completion"]
    """The kind of object."""
    choices: list[ChatChoice]
    """The answers: n of each conversation."""
    usage: Usage
    """Numbers of tokens."""
    prompt_logprobs: PromptLogprobs = None
    """Log probabilities of the prompt's tokens, where the request asks for them."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt, where the request asks for them."""


class Delta(Described):
    role: Literal["assistant"] = "assistant"
    """The author, in the first event of a choice."""
    content: str = ""
    """The new text."""
    reasoning_content: str | None = None
    """The answer's reasoning, where the model's is known."""
    reasoning: str | None = None
    """The answer's reasoning, by vLLM's newer name. It equals reasoning_content."""
    tool_calls: list[ToolCallDelta] | None = None
    """New parts of tool calls."""


class ChatDelta(Choice):
    delta: Delta
    """What is new of the answer."""
    logprobs: ChatLogprobs | None
    """Log probabilities of the tokens. null: the request asks for none."""
    finish_reason: ChatFinishReason | None
    """The end of the choice: "stop", "length" and others. null before it."""
    stop_reason: int | str | None = None
    """Present in the last event of a choice."""


class ChatCompletionChunk(ChatHead):
    object: Literal["chat.completion.chunk"]
    """The kind of object."""
    choices: list[ChatDelta]
    """What is new of choices. Empty in the event with the usage."""
    usage: Usage | None = None
    """Numbers of tokens, where stream_options asks for them."""


class CompletionLogprobs(Described):
    tokens: list[str]
    """The tokens, as texts."""
    token_logprobs: list[float | None]
    """The log probability of each token. null: the first of a prompt."""
    top_logprobs: list[dict[str, float] | None]
    """Log probabilities of the likeliest tokens, in the place of each token."""
    text_offset: list[int]
    """Characters before each token."""


class CompletionChoice(Choice):
    text: str
    """The text, or what is new of it."""
    logprobs: CompletionLogprobs | None
    """Log probabilities of the tokens. null: the request asks for none."""
    finish_reason: FinishReason | None
    """The end of the choice: "stop", "length" and others. null before it."""
    stop_reason: int | str | None
    """The stop text or token id that ended the choice. null: none did."""
    prompt_logprobs: PromptLogprobs = None
    """Log probabilities of the prompt's tokens, where the request asks for them."""


class Completion(GenerationHead):
    """The whole answer, or an event of a stream."""

    object: Literal["text_completion"]
    """The kind of object."""
    choices: list[CompletionChoice]
    """The completions: n of each prompt. In a stream, what is new of them."""
    usage: Usage | None = None
    """Numbers of tokens. In a stream: where stream_options asks for them."""


class ModelPermission(Described):
    id: str
    """The object's id."""
    object: Literal["model_permission"]
    """The kind of object."""
    created: int
    """Time at which the server was started, in seconds since 1970."""
    allow_create_engine: bool
    """Always false."""
    allow_sampling: bool
    """Always true."""
    allow_logprobs: bool
    """Always true."""
    allow_search_indices: bool
    """Always false."""
    allow_view: bool
    """Always true."""
    allow_fine_tuning: bool
    """Always false."""
    organization: str
    """The clients that it is for: all."""
    group: str | None
    """Always null."""
    is_blocking: bool
    """Always false."""


class ModelCard(Described):
    id: str
    """The model's name."""
    object: Literal["model"]
    """The kind of object."""
    created: int
    """Time at which the server was started, in seconds since 1970."""
    owned_by: str
    """Always "toolkit-lm"."""
    root: str
    """MODEL as the operator gave it."""
    parent: str | None
    """The model that an adapter belongs to. null: the model itself."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int | None
    """Number of token ids that prompts may hold. null: the checkpoint does not say."""
    sampling_defaults: dict[str, int | float]
    """Defaults from generation_config.json, for requests that say nothing."""
    permission: list[ModelPermission]
    """What clients may do, for OpenAI's older clients."""


class ModelList(Described):
    object: Literal["list"]
    """The kind of object."""
    data: list[ModelCard]
    """The served models, under each of their names."""


class TokenIds(Described):
    count: int
    """The number of tokens."""
    max_model_len: int
    """Most tokens of prompt and output together."""
    tokens: list[int]
    """The token ids."""
    token_strs: list[str] | None
    """The texts of the tokens, where the request asks for them."""


class Text(Described):
    prompt: str
    """The text of the tokens."""


class TokenizerInfo(Described):
    """Content of tokenizer_config.json, with the fields that this server adds."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    """The class of the tokenizer, by transformers' name."""
    chat_template: str | None
    """The chat template. null: there is none."""


class ServerLoad(Described):
    server_load: int
    """Prompts and inputs that are under way or wait."""


class AnyAnswer(Described):
    """The answer of the route whose fields the body has."""

    model_config = ConfigDict(extra="allow")


class EngineStatus(Described):
    engine: int
    """The engine's number."""
    status: str
    """The engine's status, such as "ready"."""
    reason: str = ""
    """The reason of the status."""
    requests_in_flight: int
    """Requests that the engine has."""
    tokens_in_flight: int
    """Tokens of their prompts and outputs."""
    restarts: int
    """How often the engine was started anew."""


class Status(Described):
    status: str
    """The engine's status, such as "ready"."""
    reason: str = ""
    """The reason of the status."""
    engines: list[EngineStatus] | None = None
    """Status of each engine, where there are several."""


NOT_NOW: dict[int | str, dict[str, Any]] = {
    503: {"model": Status, "description": "It is not so, with the status and its reason."}
}
"""The other answer of /live, /health and /ready."""


def answers(kind: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The description of answers that are of this kind."""
    return {200: {"model": kind}}


def streams(
    kind: type[BaseModel], chunk: type[BaseModel], error: type[BaseModel] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """The description of answers of this kind, or of events with these chunks and errors."""
    parts = [{"const": "[DONE]"}, _text_schema(chunk), _text_schema(error)]
    # The fields that server-sent events have beside their data are not used.
    item = {
        "type": "object",
        "properties": {"data": {"anyOf": parts}},
        "required": ["data"],
        "additionalProperties": True,
    }
    return {200: {"model": kind, "content": {"text/event-stream": {"itemSchema": item}}}}


def _text_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """The schema of a text that is JSON of this kind."""
    schema = kind.model_json_schema()
    return {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _inlined(schema, schema.get("$defs", {})),
    }


def _inlined(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema without references. Only schemas of whole answers have names in the description."""
    if isinstance(schema, list):
        return [_inlined(item, parts) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(parts[schema["$ref"].rpartition("/")[2]], parts)
    return {name: _inlined(item, parts) for name, item in schema.items() if name != "$defs"}
