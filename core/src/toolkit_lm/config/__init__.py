"""VllmConfig and its sections. Every option is stated once, here; flags, the YAML file and Python keywords are made from it."""

from toolkit_lm.config.memory import parse_memory
from toolkit_lm.config.options import Option, load_options, option, options_of, read_file
from toolkit_lm.config.pooling_profile import PoolingProfile, RoleProfile
from toolkit_lm.config.vllm import (
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
    "PoolingProfile",
    "RendererConfig",
    "RoleProfile",
    "SchedulerConfig",
    "VllmConfig",
    "load_options",
    "option",
    "options_of",
    "parse_memory",
    "read_file",
]
