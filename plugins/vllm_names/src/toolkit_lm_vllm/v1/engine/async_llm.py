"""vLLM's `vllm.v1.engine.async_llm`: the engine for event loops."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import AsyncLLM

__all__ = ["AsyncLLM"]

__getattr__ = absent(__name__)
