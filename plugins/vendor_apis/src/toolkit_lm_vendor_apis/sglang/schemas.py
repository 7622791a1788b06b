"""Shapes of SGLang's answers, for the description of the API."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, RootModel
from toolkit_lm_server.pooled_schemas import Classifications
from toolkit_lm_server.schema_texts import Described


class SglangMeta(Described):
    id: str
    finish_reason: dict[str, Any] | None
    """The type of the end: "stop", with what matched, "length", or "abort". null: there is more to
    come."""
    prompt_tokens: int
    weight_version: str | None = None
    """The version of the weights that drew the last token of an ended answer; "default": those of
    the checkpoint."""
    completion_tokens: int | None = None
    cached_tokens: int
    """Tokens of the prompt that the prefix cache had."""
    e2e_latency: float
    """Seconds since the request was taken."""
    input_token_logprobs: list[list[Any]] | None = None
    """The log probability, the id and the text of each token of the prompt."""
    output_token_logprobs: list[list[Any]] | None = None
    input_top_logprobs: list[list[list[Any]] | None] | None = None
    output_top_logprobs: list[list[list[Any]]] | None = None
    output_token_ids_logprobs: list[list[list[Any]]] | None = None
    hidden_states: list[Any] | None = None
    """Hidden states of an ended answer: a list of those of the prompt's tokens, then those of each
    further token. Each is a list of numbers, or one of such lists for several layers."""
    routed_experts: str | None = None
    """Experts [tokens, layers, top-k] of an ended answer: int32, in base64."""


class SglangAnswer(Described):
    """An answer, or an event with what there is of it."""

    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int | None = None
    """The number of the answer, in a stream of several."""


class SglangAnswers(RootModel[SglangAnswer | list[SglangAnswer]]):
    """The answer to one prompt, or those to a list of them."""


class SglangModel(Described):
    """The served model."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, Any] | None
    """The model's own defaults."""
    has_image_understanding: bool
    has_audio_understanding: bool
    model_type: str
    architectures: list[str]


class SglangEncoded(Described):
    """A prompt's vector."""

    embedding: list[float]
    meta_info: SglangMeta


class SglangEncodings(RootModel[SglangEncoded | list[SglangEncoded]]):
    """The vector of one prompt, or those of a list of them."""


class SglangClasses(RootModel[SglangEncoded | list[SglangEncoded] | Classifications]):
    """The logits of one prompt, or of each in a list; or vLLM's answer."""


class SglangServer(Described):
    """The served model, and the server's limits."""

    model_config = ConfigDict(protected_namespaces=())

    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: int
    """Most tokens of a prompt with its answer."""
    dtype: str
    tp_size: int
    """Number of tensor-parallel ranks."""
    dp_size: int
    """Number of data-parallel engines."""
    max_running_requests: int
    """Sequences that run at a time."""
    is_embedding: bool
    """Whether the model generates nothing."""
    version: str
    """The version of toolkit-lm."""
