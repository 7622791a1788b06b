"""The engine: the loop, and its synchronous and asynchronous faces."""

from llm_toolkit.engine.async_llm import AsyncLLM
from llm_toolkit.engine.core import EngineCore
from llm_toolkit.engine.explain import Explanation, LayerChoice, explain
from llm_toolkit.engine.llm_engine import LLMEngine, PreparedRequest
from llm_toolkit.engine.resolve import resolve

__all__ = ["AsyncLLM", "EngineCore", "Explanation", "LLMEngine", "LayerChoice", "PreparedRequest", "explain", "resolve"]
