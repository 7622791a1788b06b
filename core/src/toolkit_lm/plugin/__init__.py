"""The plugin framework: hooks, discovery, registries, and the fingerprint of a plugin set.

A plugin is a distribution with an entry point in the group `toolkit_lm`. Its entry module is light (no torch, no transformers) and
names what it brings as text, "module:attribute", which is imported only when it is used:

    from toolkit_lm.plugin import ModelRegistry, hookimpl

    @hookimpl
    def toolkit_register_models(models: ModelRegistry) -> None:
        models.add("MyForCausalLM", "toolkit_lm_mine.model:MyForCausalLM")
"""

from toolkit_lm.plugin.discovery import CORE_DISTRIBUTION, Candidate, discover
from toolkit_lm.plugin.fingerprint import Fingerprint
from toolkit_lm.plugin.info import PluginInfo, PluginWarning
from toolkit_lm.plugin.listener import EventListener
from toolkit_lm.plugin.loader import HEAVY_PACKAGES, SLOW_IMPORT
from toolkit_lm.plugin.markers import API_VERSION, hookimpl, hookspec
from toolkit_lm.plugin.plugins import Plugins
from toolkit_lm.plugin.registry import (
    AttentionBackendEntry,
    AttentionBackendRegistry,
    CheckpointRegistry,
    CommandEntry,
    CommandRegistry,
    ConverterRegistry,
    Entry,
    ExecutorEntry,
    ExecutorRegistry,
    LogitsProcessorEntry,
    LogitsProcessorRegistry,
    ModelEntry,
    ModelRegistry,
    PairRendererRegistry,
    PoolingProfileRegistry,
    Registry,
    RendererEntry,
    RendererRegistry,
    SchedulingPolicyEntry,
    SchedulingPolicyRegistry,
)

__all__ = [
    "API_VERSION",
    "CORE_DISTRIBUTION",
    "HEAVY_PACKAGES",
    "SLOW_IMPORT",
    "AttentionBackendEntry",
    "AttentionBackendRegistry",
    "Candidate",
    "CheckpointRegistry",
    "CommandEntry",
    "CommandRegistry",
    "ConverterRegistry",
    "Entry",
    "EventListener",
    "ExecutorEntry",
    "ExecutorRegistry",
    "Fingerprint",
    "LogitsProcessorEntry",
    "LogitsProcessorRegistry",
    "ModelEntry",
    "ModelRegistry",
    "PluginInfo",
    "PluginWarning",
    "Plugins",
    "PoolingProfileRegistry",
    "Registry",
    "RendererEntry",
    "RendererRegistry",
    "PairRendererRegistry",
    "SchedulingPolicyEntry",
    "SchedulingPolicyRegistry",
    "discover",
    "hookimpl",
    "hookspec",
]
