"""Classes of vLLM: with additions to our classes, equal to ours, or under other names here."""

from __future__ import annotations

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
