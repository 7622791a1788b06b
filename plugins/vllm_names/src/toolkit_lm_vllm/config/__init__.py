"""vLLM's `vllm.config`: sections of a config."""

from toolkit_lm.config import VllmConfig
from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.settings import (
    AttentionConfig,
    CompilationConfig,
    CompilationMode,
    CUDAGraphMode,
    PoolerConfig,
    ProfilerConfig,
    SpeculativeConfig,
    StructuredOutputsConfig,
)

__all__ = [
    "AttentionConfig",
    "CUDAGraphMode",
    "CompilationConfig",
    "CompilationMode",
    "PoolerConfig",
    "ProfilerConfig",
    "SpeculativeConfig",
    "StructuredOutputsConfig",
    "VllmConfig",
]

__getattr__ = absent(__name__)
