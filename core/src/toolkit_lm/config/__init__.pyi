from .cache import CacheConfig as CacheConfig
from .checkpoint import Checkpoint as Checkpoint, PoolingProfile as PoolingProfile
from .compilation import (
    OPAQUE_OPS as OPAQUE_OPS,
    CompilationConfig as CompilationConfig,
    CompilationOptions as CompilationOptions,
)
from .device import AttentionConfig as AttentionConfig, DeviceConfig as DeviceConfig
from .engine import EngineConfig as EngineConfig
from .limits import LimitsConfig as LimitsConfig
from .memory import parse_memory as parse_memory
from .model import LoadConfig as LoadConfig, ModelConfig as ModelConfig
from .options import (
    ENV_PREFIX as ENV_PREFIX,
    Option as Option,
    load_options as load_options,
    option as option,
    options_of as options_of,
)
from .parallel import NodeConfig as NodeConfig, ParallelConfig as ParallelConfig
from .plugins import PluginsConfig as PluginsConfig
from .pooler import PoolerConfig as PoolerConfig
from .renderer import RendererConfig as RendererConfig
from .scheduler import SchedulerConfig as SchedulerConfig
from .tasks import (
    POOLING_TASKS as POOLING_TASKS,
    PoolingTask as PoolingTask,
    Task as Task,
    way_to_serve as way_to_serve,
)
from .typed_options import LLMOptions as LLMOptions, VllmOptions as VllmOptions
from .vllm import VllmConfig as VllmConfig
