"""toolkit-lm: LLM inference and serving built as a plugin framework.

The public names are resolved when they are used: importing this package imports no torch and looks for no plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit_lm._lazy import resolver
from toolkit_lm._version import __version__

if TYPE_CHECKING:
    from toolkit_lm.config import VllmConfig
    from toolkit_lm.engine import AsyncLLM, LLMEngine
    from toolkit_lm.llm import LLM
    from toolkit_lm.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        RerankResult,
        ScoringRequestOutput,
    )
    from toolkit_lm.params import SamplingParams
    from toolkit_lm.pooling_params import PoolingParams
    from toolkit_lm.prompts import TextPrompt, TokensPrompt

_HOMES = {
    "llm": ("LLM",),
    "engine": ("AsyncLLM", "LLMEngine"),
    "config": ("VllmConfig",),
    "params": ("SamplingParams",),
    "pooling_params": ("PoolingParams",),
    "prompts": ("TextPrompt", "TokensPrompt"),
    "outputs": (
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "PoolingRequestOutput",
        "RequestOutput",
        "RerankResult",
        "ScoringRequestOutput",
    ),
}

__all__ = [
    "AsyncLLM",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LLM",
    "LLMEngine",
    "Logprob",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RerankResult",
    "SamplingParams",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "VllmConfig",
    "__version__",
]


_resolve = resolver(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return _resolve(name)


def __dir__() -> list[str]:
    return __all__
