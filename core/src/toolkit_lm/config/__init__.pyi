from .compilation import (
    OPAQUE_OPS as OPAQUE_OPS,
    CompilationConfig as CompilationConfig,
    CompilationOptions as CompilationOptions,
)
from .memory import parse_memory as parse_memory
from .options import (
    ENV_PREFIX as ENV_PREFIX,
    Option as Option,
    load_options as load_options,
    option as option,
    options_of as options_of,
)
from .pooling_profile import PoolingProfile as PoolingProfile
from .tasks import (
    POOLING_TASKS as POOLING_TASKS,
    PoolingTask as PoolingTask,
    Task as Task,
    way_to_serve as way_to_serve,
)
from .vllm import (
    AttentionConfig as AttentionConfig,
    CacheConfig as CacheConfig,
    Checkpoint as Checkpoint,
    DeviceConfig as DeviceConfig,
    EngineConfig as EngineConfig,
    LimitsConfig as LimitsConfig,
    LoadConfig as LoadConfig,
    ModelConfig as ModelConfig,
    NodeConfig as NodeConfig,
    ParallelConfig as ParallelConfig,
    PluginsConfig as PluginsConfig,
    PoolerConfig as PoolerConfig,
    RendererConfig as RendererConfig,
    SchedulerConfig as SchedulerConfig,
    VllmConfig as VllmConfig,
)
