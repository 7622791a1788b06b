"""VllmConfig and its sections. Every option is stated once, here; flags, the YAML file and Python keywords are made from it."""

from llm_toolkit.config.memory import parse_memory
from llm_toolkit.config.options import Option, load_options, option, options_of, read_file
from llm_toolkit.config.vllm import (
    AttentionConfig,
    CacheConfig,
    Checkpoint,
    DeviceConfig,
    EngineConfig,
    LimitsConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    PluginsConfig,
    PoolerConfig,
    RendererConfig,
    SchedulerConfig,
    VllmConfig,
)

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "Checkpoint",
    "DeviceConfig",
    "EngineConfig",
    "LimitsConfig",
    "LoadConfig",
    "ModelConfig",
    "Option",
    "ParallelConfig",
    "PluginsConfig",
    "PoolerConfig",
    "RendererConfig",
    "SchedulerConfig",
    "VllmConfig",
    "load_options",
    "option",
    "options_of",
    "parse_memory",
    "read_file",
]
