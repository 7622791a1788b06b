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
from .registries import (
    AttentionBackendRegistry as AttentionBackendRegistry,
    CheckpointRegistry as CheckpointRegistry,
    CompilerRegistry as CompilerRegistry,
    ConverterRegistry as ConverterRegistry,
    DrafterRegistry as DrafterRegistry,
    EngineClientRegistry as EngineClientRegistry,
    ExecutorEntry as ExecutorEntry,
    ExecutorRegistry as ExecutorRegistry,
    KernelsRegistry as KernelsRegistry,
    KVKindRegistry as KVKindRegistry,
    LoaderEntry as LoaderEntry,
    LoaderRegistry as LoaderRegistry,
    LogitsProcessorEntry as LogitsProcessorEntry,
    LogitsProcessorRegistry as LogitsProcessorRegistry,
    ModelEntry as ModelEntry,
    ModelRegistry as ModelRegistry,
    OptionNamesRegistry as OptionNamesRegistry,
    ParserRegistry as ParserRegistry,
    PoolingInputsRegistry as PoolingInputsRegistry,
    PoolingProfileRegistry as PoolingProfileRegistry,
    QuantizationRegistry as QuantizationRegistry,
    RendererEntry as RendererEntry,
    RendererRegistry as RendererRegistry,
    SchedulingPolicyEntry as SchedulingPolicyEntry,
    SchedulingPolicyRegistry as SchedulingPolicyRegistry,
    by_hook as by_hook,
)
from .registry import Entry as Entry, PlainRegistry as PlainRegistry, Registry as Registry
from .shipped import parameter_source as parameter_source, way_to_get as way_to_get
