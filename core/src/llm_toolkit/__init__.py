"""llm-toolkit: LLM inference and serving built as a plugin framework.

The public names are resolved when they are used: importing this package imports no torch and looks for no plugin.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_toolkit._lazy import resolver
from llm_toolkit._version import __version__

if TYPE_CHECKING:
    from llm_toolkit.config import VllmConfig
    from llm_toolkit.engine import AsyncLLM, LLMEngine
    from llm_toolkit.llm import LLM
    from llm_toolkit.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        RerankResult,
        ScoringRequestOutput,
    )
    from llm_toolkit.params import SamplingParams
    from llm_toolkit.pooling_params import PoolingParams
    from llm_toolkit.prompts import TextPrompt, TokensPrompt

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
