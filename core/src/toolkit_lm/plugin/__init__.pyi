from .discovery import (
    CORE_DISTRIBUTION as CORE_DISTRIBUTION,
    Candidate as Candidate,
    discover as discover,
)
from .fingerprint import Fingerprint as Fingerprint
from .info import PluginInfo as PluginInfo, PluginWarning as PluginWarning
from .listener import EventListener as EventListener
from .markers import API_VERSION as API_VERSION, hookimpl as hookimpl, hookspec as hookspec
from .plugins import Plugins as Plugins
from .registries import by_hook as by_hook
from .registries.backends import (
    AttentionBackendRegistry as AttentionBackendRegistry,
    CompilerRegistry as CompilerRegistry,
    KernelsRegistry as KernelsRegistry,
)
from .registries.checkpoints import (
    CheckpointRegistry as CheckpointRegistry,
    LoaderEntry as LoaderEntry,
    LoaderRegistry as LoaderRegistry,
    QuantizationRegistry as QuantizationRegistry,
)
from .registries.engines import (
    EngineClientRegistry as EngineClientRegistry,
    ExecutorEntry as ExecutorEntry,
    ExecutorRegistry as ExecutorRegistry,
    KVKindRegistry as KVKindRegistry,
    SchedulingPolicyEntry as SchedulingPolicyEntry,
    SchedulingPolicyRegistry as SchedulingPolicyRegistry,
)
from .registries.kv_tiers import KVTierEntry as KVTierEntry, KVTierRegistry as KVTierRegistry
from .registries.logits_processors import (
    LogitsProcessorEntry as LogitsProcessorEntry,
    LogitsProcessorRegistry as LogitsProcessorRegistry,
)
from .registries.models import (
    DrafterRegistry as DrafterRegistry,
    ModelEntry as ModelEntry,
    ModelRegistry as ModelRegistry,
)
from .registries.option_names import OptionNamesRegistry as OptionNamesRegistry
from .registries.parts import PartEntry as PartEntry, PartRegistry as PartRegistry
from .registries.pooling import (
    ConverterRegistry as ConverterRegistry,
    PoolingInputsRegistry as PoolingInputsRegistry,
    PoolingProfileRegistry as PoolingProfileRegistry,
)
from .registries.renderers import (
    ParserRegistry as ParserRegistry,
    RendererEntry as RendererEntry,
    RendererRegistry as RendererRegistry,
)
from .registry import Entry as Entry, PlainRegistry as PlainRegistry, Registry as Registry
from .shipped import parameter_source as parameter_source, way_to_get as way_to_get
