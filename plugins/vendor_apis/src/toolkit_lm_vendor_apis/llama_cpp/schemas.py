"""Shapes of llama.cpp's answers, for the description of the API."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, RootModel
from toolkit_lm_server.answer_schemas import Timings
from toolkit_lm_server.schema_texts import Described


class LlamaProbability(Described):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class LlamaProbabilities(LlamaProbability):
    top_logprobs: list[LlamaProbability]


class LlamaProgress(Described):
    """How far a prompt is read."""

    total: int
    """Tokens of the prompt."""
    cache: int
    """Tokens that the prefix cache had."""
    processed: int
    """Tokens that are read, those of the cache among them."""
    time_ms: float
    """Milliseconds from the arrival of the request."""


class LlamaAnswer(Described):
    """The answer to one prompt, or an event of a stream. Events before a prompt's last have few
    fields. With `response_fields`, an answer has these alone."""

    model_config = ConfigDict(extra="allow")

    index: int | None = None
    content: str | None = None
    tokens: list[int] | None = None
    """The token ids of `content`, where the request asks for them, and in events."""
    stop: bool | None = None
    """Whether the answer is at its end."""
    id_slot: int | None = None
    """-1: no request has a slot of its own."""
    model: str | None = None
    tokens_predicted: int | None = None
    tokens_evaluated: int | None = None
    """Tokens of the prompt."""
    generation_settings: dict[str, Any] | None = None
    """Sampling parameters of the answer."""
    prompt: str | None = None
    """The prompt as the model read it."""
    has_new_line: bool | None = None
    truncated: bool | None = None
    """False: a prompt that does not fit is refused."""
    stop_type: Literal["eos", "limit", "word", "none"] | None = None
    stopping_word: str | None = None
    tokens_cached: int | None = None
    """Tokens of the prompt that the prefix cache had."""
    timings: Timings | None = None
    completion_probabilities: list[LlamaProbabilities] | None = None
    prompt_progress: LlamaProgress | None = None


class LlamaAnswers(RootModel[LlamaAnswer | list[LlamaAnswer]]):
    """The answer to one prompt, or those to a list of them."""


class LlamaTemplate(Described):
    prompt: str
    """The conversation as the chat template writes it."""


class LlamaPiece(Described):
    id: int
    piece: str | list[int]
    """The token's text, or its bytes where they are a part of a character."""


class LlamaTokens(Described):
    tokens: list[int] | list[LlamaPiece]
    count: int | None = None
    """Number of tokens, in answers to vLLM's bodies, as are the next two."""
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class LlamaVector(Described):
    index: int
    """The number of the prompt."""
    embedding: list[list[float]]
    """The prompt's vector, in a list of its own."""


class LlamaVectors(RootModel[list[LlamaVector]]):
    """A vector of each prompt."""


class LlamaText(Described):
    content: str
    prompt: str
    """The same, by vLLM's name."""


class LlamaSlot(Described):
    id: int
    id_task: int
    n_ctx: int
    """Most tokens of a prompt with its answer."""
    speculative: bool
    is_processing: bool
    params: dict[str, Any]
    """Sampling parameters of requests that say nothing."""


class LlamaSlots(RootModel[list[LlamaSlot]]):
    """The places of the batch."""


class LlamaDefaults(LlamaSlot):
    prompt: str


class LlamaModalities(Described):
    vision: bool
    audio: bool


class LlamaProps(Described):
    default_generation_settings: LlamaDefaults
    total_slots: int
    """Sequences that run at a time."""
    model_path: str
    model_alias: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: LlamaModalities
    build_info: str
    is_sleeping: bool
