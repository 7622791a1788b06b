from .attention import AttentionConfig as AttentionConfig
from .cache import CacheConfig as CacheConfig
from .checkpoint import Checkpoint as Checkpoint
from .compilation import (
    OPAQUE_OPS as OPAQUE_OPS,
    CompilationConfig as CompilationConfig,
    CompilationOptions as CompilationOptions,
)
from .device import DeviceConfig as DeviceConfig
from .engine import EngineConfig as EngineConfig
from .limits import LimitsConfig as LimitsConfig
from .load import LoadConfig as LoadConfig
from .memory import parse_memory as parse_memory
from .model import ModelConfig as ModelConfig
from .node import NodeConfig as NodeConfig
from .options import (
    ENV_PREFIX as ENV_PREFIX,
    Option as Option,
    load_options as load_options,
    option as option,
    options_of as options_of,
)
from .parallel import ParallelConfig as ParallelConfig
from .plugins import PluginsConfig as PluginsConfig
from .pooler import PoolerConfig as PoolerConfig
from .pooling_profile import PoolingProfile as PoolingProfile
from .renderer import RendererConfig as RendererConfig
from .scheduler import SchedulerConfig as SchedulerConfig
from .tasks import (
    POOLING_TASKS as POOLING_TASKS,
    PoolingTask as PoolingTask,
    Task as Task,
    way_to_serve as way_to_serve,
)
from .vllm import VllmConfig as VllmConfig
