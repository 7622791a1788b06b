"""Sections of vLLM's config, as mappings: an engine's options of the same names take them."""

from __future__ import annotations

from enum import IntEnum
from typing import Any


class Settings(dict[str, Any]):
    """A mapping that is made of keywords, and has its keys as attributes. What is not given is
    None."""

    def __init__(self, **keys: Any) -> None:
        """Takes the option's keys. The engine checks them."""
        super().__init__(keys)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.get(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class PoolerConfig(Settings):
    """Value of `pooler_config`: pooling_type, normalize, use_activation, ..."""


class CompilationConfig(Settings):
    """Value of `compilation_config`: mode, cudagraph_mode, compile_sizes, ..."""


class StructuredOutputsConfig(Settings):
    """Value of `structured_outputs_config`: backend."""


class SpeculativeConfig(Settings):
    """Value of `speculative_config`: method, num_speculative_tokens, model, ..."""


class AttentionConfig(Settings):
    """Value of `attention_config`: backend."""


class ProfilerConfig(Settings):
    """Value of `profiler_config`: torch_profiler_dir, delay_iterations, max_iterations, ..."""


class CompilationMode(IntEnum):
    """Value of CompilationConfig's `mode`."""

    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class CUDAGraphMode(IntEnum):
    """Value of CompilationConfig's `cudagraph_mode`."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = 3
    FULL_AND_PIECEWISE = 4
