"""Registries: one for each kind of entry that plugins bring to core."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit_lm.plugin.info import PluginInfo
from toolkit_lm.plugin.registries.backends import (
    AttentionBackendRegistry,
    CompilerRegistry,
    KernelsRegistry,
)
from toolkit_lm.plugin.registries.checkpoints import (
    CheckpointRegistry,
    LoaderRegistry,
    QuantizationRegistry,
)
from toolkit_lm.plugin.registries.engines import (
    EngineClientRegistry,
    ExecutorRegistry,
    KVKindRegistry,
    SchedulingPolicyRegistry,
)
from toolkit_lm.plugin.registries.kv_tiers import KVTierRegistry
from toolkit_lm.plugin.registries.logits_processors import LogitsProcessorRegistry
from toolkit_lm.plugin.registries.models import DrafterRegistry, ModelRegistry
from toolkit_lm.plugin.registries.option_names import OptionNamesRegistry
from toolkit_lm.plugin.registries.parts import PartRegistry
from toolkit_lm.plugin.registries.pooling import (
    ConverterRegistry,
    PoolingInputsRegistry,
    PoolingProfileRegistry,
)
from toolkit_lm.plugin.registries.renderers import ParserRegistry, RendererRegistry
from toolkit_lm.plugin.registry import Registry


@dataclass(eq=False, repr=False)
class Registries:
    """All registries of core. The hook toolkit_register_NAME fills the registry NAME."""

    models: ModelRegistry = field(default_factory=ModelRegistry)
    attention_backends: AttentionBackendRegistry = field(default_factory=AttentionBackendRegistry)
    kernels: KernelsRegistry = field(default_factory=KernelsRegistry)
    compilers: CompilerRegistry = field(default_factory=CompilerRegistry)
    kv_kinds: KVKindRegistry = field(default_factory=KVKindRegistry)
    kv_tiers: KVTierRegistry = field(default_factory=KVTierRegistry)
    executors: ExecutorRegistry = field(default_factory=ExecutorRegistry)
    renderers: RendererRegistry = field(default_factory=RendererRegistry)
    parsers: ParserRegistry = field(default_factory=ParserRegistry)
    logits_processors: LogitsProcessorRegistry = field(default_factory=LogitsProcessorRegistry)
    scheduling_policies: SchedulingPolicyRegistry = field(default_factory=SchedulingPolicyRegistry)
    drafters: DrafterRegistry = field(default_factory=DrafterRegistry)
    parts: PartRegistry = field(default_factory=PartRegistry)
    pooling: ConverterRegistry = field(default_factory=ConverterRegistry)
    pooling_profiles: PoolingProfileRegistry = field(default_factory=PoolingProfileRegistry)
    pooling_inputs: PoolingInputsRegistry = field(default_factory=PoolingInputsRegistry)
    engine_clients: EngineClientRegistry = field(default_factory=EngineClientRegistry)
    checkpoints: CheckpointRegistry = field(default_factory=CheckpointRegistry)
    loaders: LoaderRegistry = field(default_factory=LoaderRegistry)
    quantization: QuantizationRegistry = field(default_factory=QuantizationRegistry)
    option_names: OptionNamesRegistry = field(default_factory=OptionNamesRegistry)
    brought: dict[str, Registry[Any]] = field(default_factory=dict)
    """Registries that plugins bring together with a hook, by the hook that fills them."""


def by_hook(registries: Registries) -> dict[str, Registry[Any]]:
    """All registries, by the hook that fills them."""
    own = {
        f"toolkit_register_{name}": registry
        for name, registry in vars(registries).items()
        if isinstance(registry, Registry)
    }
    return own | registries.brought


def copied(registries: Registries, owner: PluginInfo | None, hint: str = "") -> Registries:
    """Returns a copy that takes the entries of `owner`."""
    own: dict[str, Any] = {
        name: registry.copy(owner, hint)
        for name, registry in vars(registries).items()
        if isinstance(registry, Registry)
    }
    return Registries(
        **own,
        brought={hook: registry.copy(owner, hint) for hook, registry in registries.brought.items()},
    )
