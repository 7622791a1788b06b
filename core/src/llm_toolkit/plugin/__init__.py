"""The plugin framework: hooks, discovery, registries, and the fingerprint of a plugin set.

A plugin is a distribution with an entry point in the group `llm_toolkit`. Its entry module is light (no torch, no transformers) and
names what it brings as text, "module:attribute", which is imported only when it is used:

    from llm_toolkit.plugin import ModelRegistry, hookimpl

    @hookimpl
    def toolkit_register_models(models: ModelRegistry) -> None:
        models.add("MyForCausalLM", "llm_toolkit_mine.model:MyForCausalLM")
"""

from llm_toolkit.plugin.fingerprint import Fingerprint
from llm_toolkit.plugin.info import PluginInfo, PluginWarning
from llm_toolkit.plugin.listener import EventListener
from llm_toolkit.plugin.markers import API_VERSION, hookimpl, hookspec
from llm_toolkit.plugin.plugins import Plugins
from llm_toolkit.plugin.registry import (
    AttentionBackendEntry,
    AttentionBackendRegistry,
    CheckpointEntry,
    CheckpointRegistry,
    CommandEntry,
    CommandRegistry,
    ConverterEntry,
    ConverterRegistry,
    Entry,
    LogitsProcessorEntry,
    LogitsProcessorRegistry,
    ModelEntry,
    ModelRegistry,
    Registry,
    RendererEntry,
    RendererRegistry,
    ScoreTemplateEntry,
    ScoreTemplateRegistry,
)

__all__ = [
    "API_VERSION",
    "AttentionBackendEntry",
    "AttentionBackendRegistry",
    "CheckpointEntry",
    "CheckpointRegistry",
    "CommandEntry",
    "CommandRegistry",
    "ConverterEntry",
    "ConverterRegistry",
    "Entry",
    "EventListener",
    "Fingerprint",
    "LogitsProcessorEntry",
    "LogitsProcessorRegistry",
    "ModelEntry",
    "ModelRegistry",
    "PluginInfo",
    "PluginWarning",
    "Plugins",
    "Registry",
    "RendererEntry",
    "RendererRegistry",
    "ScoreTemplateEntry",
    "ScoreTemplateRegistry",
    "hookimpl",
    "hookspec",
]
