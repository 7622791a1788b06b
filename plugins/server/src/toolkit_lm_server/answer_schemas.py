"""Shapes of the answers, for the description of the API. Answers are made elsewhere, without these
classes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from toolkit_lm.params import FinishReason

from toolkit_lm_server.errors import ErrorBody

ChatFinishReason = FinishReason | Literal["tool_calls"]


class CachedTokens(BaseModel):
    cached_tokens: int


class ReasoningTokens(BaseModel):
    reasoning_tokens: int
    """Tokens of reasoning in all choices, without the marks around it."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None
    """Present in chats with a model whose reasoning is known."""
    draft_tokens: int | None = None
    """Verified drafts. Present with speculative decoding, if there were any."""
    accepted_draft_tokens: int | None = None
    drafters: dict[str, DrafterUsage] | None = None
    """Both by drafter."""


class DrafterUsage(BaseModel):
    draft_tokens: int
    accepted_draft_tokens: int


class PoolingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class Head(BaseModel):
    id: str
    created: int
    model: str


class PromptLogprob(BaseModel):
    logprob: float
    rank: int
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None] | None
"""Entries by token id, one mapping per token of the prompt. The first token's is null."""


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ContentLogprob]
    refusal: None


class FunctionCall(BaseModel):
    name: str
    arguments: str
    """JSON of an object, unless the answer was cut."""


class ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionCallDelta(BaseModel):
    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """A part of a tool call. A call's first part has its id, type and name."""

    index: int
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCallDelta


class Message(BaseModel):
    role: Literal["assistant"]
    content: str | None
    """Text of the answer. null where it has tool calls only."""
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The answer's reasoning, by vLLM's newer name. It equals reasoning_content."""
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    token_ids: list[int] | None = None
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: int | str | None


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs = None
    prompt_token_ids: list[int] | None = None


class Delta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatDelta(BaseModel):
    index: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    """Present in the last event of a choice."""


class ChatCompletionChunk(Head):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatDelta]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(Head):
    """The whole answer, or an event of a stream."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Filling(BaseModel):
    """The whole answer of /infill, or an event of its stream. Events before a choice's last have
    the first three fields alone."""

    index: int
    content: str
    stop: bool
    stop_type: Literal["eos", "limit", "none"] | None = None
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    tokens_cached: int | None = None
    truncated: bool | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """The vector's numbers, or a text: base64 of float32 values, little-endian."""


class EmbeddingList(Head):
    object: Literal["list"]
    data: list[Embedding]
    usage: PoolingUsage


class Pooled(BaseModel):
    object: Literal["pooling"]
    index: int
    data: list[float] | list[list[float]] | str
    shape: list[int] = []
    """The shape of the array whose base64 is in `data`."""


class PooledList(Head):
    object: Literal["list"]
    data: list[Pooled]
    usage: PoolingUsage


class Classification(BaseModel):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classifications(Head):
    object: Literal["list"]
    data: list[Classification]
    usage: PoolingUsage


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: float


class Scores(Head):
    object: Literal["list"]
    data: list[Score]
    usage: PoolingUsage


class ApiVersion(BaseModel):
    version: str


class BilledUnits(BaseModel):
    input_tokens: int = 0
    search_units: int = 0


class CohereMeta(BaseModel):
    api_version: ApiVersion
    billed_units: BilledUnits


class Document(BaseModel):
    text: str


class RerankResult(BaseModel):
    index: int
    relevance_score: float
    document: Document | None = None


class Ranking(BaseModel):
    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
    meta: CohereMeta


class CohereEmbeddings(BaseModel):
    id: str
    response_type: Literal["embeddings_by_type"]
    embeddings: dict[
        Literal["float", "int8", "uint8", "binary", "ubinary", "base64"],
        list[list[float]] | list[str],
    ]
    texts: list[str]
    meta: CohereMeta


class OldCohereEmbeddings(BaseModel):
    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: Any
    """A list of vectors. Where the request asks for types, an object with such a list by type."""
    texts: list[str]
    meta: CohereMeta


class ModelPermission(BaseModel):
    id: str
    object: Literal["model_permission"]
    created: int
    allow_create_engine: bool
    allow_sampling: bool
    allow_logprobs: bool
    allow_search_indices: bool
    allow_view: bool
    allow_fine_tuning: bool
    organization: str
    group: str | None
    is_blocking: bool


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """MODEL as the operator gave it."""
    parent: str | None
    max_model_len: int
    sampling_defaults: dict[str, int | float]
    """Defaults from generation_config.json, for requests that say nothing."""
    permission: list[ModelPermission]


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenIds(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Text(BaseModel):
    prompt: str


class RenderedArray(BaseModel):
    """A tensor: C order, little-endian."""

    dtype: str
    """The dtype's name in numpy, such as "float32"."""
    shape: list[int]
    data: str
    """Values in base64. An answer in msgpack has them in binary."""


class RenderedRange(BaseModel):
    offset: int
    length: int
    mask: list[bool] | None
    """Marks the tokens that the item's embeddings replace. null marks all."""


class RenderedFeature(BaseModel):
    """A media item in a prompt."""

    modality: str
    mm_identifier: str
    """Identifier of the item's content. Items with equal ones have equal data."""
    mm_position: RenderedRange
    data: dict[str, RenderedArray] | None
    """Tensors by name. null where the request's `held` has the identifier."""
    layout: dict[str, list[float]]


class RenderedPrompt(BaseModel):
    """A prompt, as an engine takes it. It comes in msgpack where the client accepts
    application/msgpack."""

    model: str
    token_ids: list[int]
    features: list[RenderedFeature] | None
    """Items of media among the tokens, by offset."""
    sampling_params: dict[str, Any]
    """Sampling parameters that differ from their defaults."""
    max_model_len: int


class RenderedList(BaseModel):
    object: Literal["list"]
    data: list[RenderedPrompt]


class Derendered(BaseModel):
    text: str


class TokenizerInfo(BaseModel):
    """Content of tokenizer_config.json, with the fields that this server adds."""

    model_config = ConfigDict(extra="allow")

    tokenizer_class: str
    chat_template: str | None


class ServerLoad(BaseModel):
    server_load: int


class AnyAnswer(BaseModel):
    """The answer of the route whose fields the body has."""

    model_config = ConfigDict(extra="allow")


class EngineStatus(BaseModel):
    engine: int
    status: str
    reason: str = ""
    requests_in_flight: int
    tokens_in_flight: int
    restarts: int


class Status(BaseModel):
    status: str
    reason: str = ""
    engines: list[EngineStatus] | None = None
    """Status of each engine, where there are several."""


NOT_NOW: dict[int | str, dict[str, Any]] = {
    503: {"model": Status, "description": "It is not so, with the status and its reason."}
}
"""The other answer of /live, /health and /ready."""


def answers(kind: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The description of answers that are of this kind."""
    return {200: {"model": kind}}


def streams(kind: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The description of answers of this kind, or streams of events with these chunks."""
    event = {"anyOf": [{"const": "[DONE]"}, _text_schema(chunk), _text_schema(ErrorBody)]}
    # The fields that server-sent events have beside their data are not used.
    item = {
        "type": "object",
        "properties": {"data": event},
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
