"""vLLM's `vllm.engine.async_llm_engine`: the engine for event loops."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import AsyncLLMEngine

__all__ = ["AsyncLLMEngine"]

__getattr__ = absent(__name__)
