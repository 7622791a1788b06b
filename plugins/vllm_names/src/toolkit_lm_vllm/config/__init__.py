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
from toolkit_lm_vllm_names.weight_config import WeightTransferConfig

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
    "WeightTransferConfig",
]

__getattr__ = absent(__name__)
