"""vLLM's `vllm.v1.engine.llm_engine`: the engine in the caller's thread."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import LLMEngine

__all__ = ["LLMEngine"]

__getattr__ = absent(__name__)
