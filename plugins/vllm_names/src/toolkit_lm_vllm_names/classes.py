"""Classes of vLLM: with additions to our classes, equal to ours, or under other names here."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from toolkit_lm import (
    CompletionOutput,
    ExplicitEncoderDecoderPrompt,
    Logprob,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    TextPrompt,
    TokensPrompt,
)
from toolkit_lm.prompts import Prompt

from toolkit_lm_vllm_names.engines import AsyncLLM, LLMEngine
from toolkit_lm_vllm_names.llm import LLM
from toolkit_lm_vllm_names.pooling_params import PoolingParams
from toolkit_lm_vllm_names.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "ExplicitEncoderDecoderPrompt",
    "LLMEngine",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SingletonPrompt",
    "TextPrompt",
    "TokensPrompt",
]

AsyncLLMEngine = AsyncLLM
EmbeddingRequestOutput = ClassificationRequestOutput = ScoringRequestOutput = PoolingRequestOutput
EmbeddingOutput = ClassificationOutput = ScoringOutput = PoolingOutput
PromptType = Prompt
SingletonPrompt = str | TextPrompt | TokensPrompt


class EmbedsPrompt(TypedDict):
    """A prompt of embeddings, for an engine with `enable_prompt_embeds`."""

    prompt_embeds: Any
    """A tensor [n, H], a row for each token."""
    cache_salt: NotRequired[str | None]
    """Requests with different salts share no cached prefix."""
