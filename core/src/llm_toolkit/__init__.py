"""llm-toolkit: LLM inference and serving built as a plugin framework.

The public names are resolved when they are used: importing this package imports no torch and looks for no plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from llm_toolkit._version import __version__

if TYPE_CHECKING:
    from llm_toolkit.config import VllmConfig
    from llm_toolkit.engine import AsyncLLM, LLMEngine
    from llm_toolkit.llm import LLM
    from llm_toolkit.outputs import CompletionOutput, Logprob, RequestOutput
    from llm_toolkit.params import SamplingParams
    from llm_toolkit.prompts import TextPrompt, TokensPrompt

_HOMES = {
    "LLM": "llm_toolkit.llm",
    "AsyncLLM": "llm_toolkit.engine",
    "LLMEngine": "llm_toolkit.engine",
    "VllmConfig": "llm_toolkit.config",
    "SamplingParams": "llm_toolkit.params",
    "TextPrompt": "llm_toolkit.prompts",
    "TokensPrompt": "llm_toolkit.prompts",
    "CompletionOutput": "llm_toolkit.outputs",
    "Logprob": "llm_toolkit.outputs",
    "RequestOutput": "llm_toolkit.outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "VllmConfig",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'llm_toolkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
