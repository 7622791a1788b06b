"""Classes of vLLM: with additions to our classes, equal to ours, or under other names here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import toolkit_lm
from toolkit_lm import (
    CompletionOutput,
    PoolingParams,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from toolkit_lm.prompts import Prompt

from toolkit_lm_vllm_names.beam_search import BeamSearchOutput, BeamSearchParams
from toolkit_lm_vllm_names.engine_args import EngineArgs

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLMEngine",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
]


class LLM(toolkit_lm.LLM):
    """toolkit_lm.LLM with beam searches as vLLM has them. A type checker takes vLLM's options."""

    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Takes options by vLLM's names or ours, otherwise like toolkit_lm.LLM. Raises
        ToolkitError."""
        super().__init__(model, **options)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **options: Any
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences of each prompt. `options` are those of `generate`."""
        outputs = self.generate(prompts, params.sampling_params(), **options)
        return [params.result(output) for output in outputs]


class LLMEngine(toolkit_lm.LLMEngine):
    """toolkit_lm.LLMEngine, made from EngineArgs."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine of these options. Raises ToolkitError."""
        return cls(engine_args.create_engine_config())


class AsyncLLM(toolkit_lm.AsyncLLM):
    """toolkit_lm.AsyncLLM, made from EngineArgs."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """An engine of these options. Raises ToolkitError."""
        return cls(engine_args.create_engine_config())

    def shutdown(self) -> None:
        """Alias of `close`."""
        self.close()


AsyncLLMEngine = AsyncLLM
EmbeddingRequestOutput = ClassificationRequestOutput = ScoringRequestOutput = PoolingRequestOutput
