"""vLLM's `vllm.config.compilation`: the section of compilation."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.settings import CompilationConfig, CompilationMode, CUDAGraphMode

__all__ = ["CUDAGraphMode", "CompilationConfig", "CompilationMode"]

__getattr__ = absent(__name__)
