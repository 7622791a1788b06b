"""vLLM's `vllm.entrypoints.llm`: the face for lists of prompts."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.classes import LLM

__all__ = ["LLM"]

__getattr__ = absent(__name__)
