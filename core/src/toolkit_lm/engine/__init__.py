"""The engine: the loop, and its synchronous and asynchronous faces.

The names are resolved when they are used: a front whose engine runs in another process needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit_lm._lazy import resolver

if TYPE_CHECKING:
    from toolkit_lm.engine.async_llm import AsyncLLM
    from toolkit_lm.engine.client import EngineClient, EngineInfo
    from toolkit_lm.engine.core import EngineCore
    from toolkit_lm.engine.explanation import Explanation, LayerChoice, explain
    from toolkit_lm.engine.llm_engine import LLMEngine, PreparedRequest
    from toolkit_lm.engine.resolution import resolve

_HOMES = {
    "async_llm": ("AsyncLLM",),
    "client": ("EngineClient", "EngineInfo"),
    "core": ("EngineCore",),
    "explanation": ("Explanation", "LayerChoice", "explain"),
    "llm_engine": ("LLMEngine", "PreparedRequest"),
    "resolution": ("resolve",),
}

__all__ = [
    "AsyncLLM",
    "EngineClient",
    "EngineCore",
    "EngineInfo",
    "Explanation",
    "LLMEngine",
    "LayerChoice",
    "PreparedRequest",
    "explain",
    "resolve",
]

_resolve = resolver(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return _resolve(name)


def __dir__() -> list[str]:
    return __all__
