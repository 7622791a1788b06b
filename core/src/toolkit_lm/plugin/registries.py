"""Registries: all registries of one plugin set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from toolkit_lm.plugin.info import PluginInfo
from toolkit_lm.plugin.registry import (
    AttentionBackendRegistry,
    CheckpointRegistry,
    CommandRegistry,
    ConverterRegistry,
    ExecutorRegistry,
    KVKindRegistry,
    LoaderRegistry,
    LogitsProcessorRegistry,
    ModelRegistry,
    PairRendererRegistry,
    PoolingProfileRegistry,
    QuantizationRegistry,
    Registry,
    RendererRegistry,
    SchedulingPolicyRegistry,
)


@dataclass(eq=False, repr=False)
class Registries:
    """The registry `name` is filled by the hook toolkit_register_name."""

    models: ModelRegistry = field(default_factory=ModelRegistry)
    attention_backends: AttentionBackendRegistry = field(default_factory=AttentionBackendRegistry)
    kv_kinds: KVKindRegistry = field(default_factory=KVKindRegistry)
    executors: ExecutorRegistry = field(default_factory=ExecutorRegistry)
    renderers: RendererRegistry = field(default_factory=RendererRegistry)
    logits_processors: LogitsProcessorRegistry = field(default_factory=LogitsProcessorRegistry)
    scheduling_policies: SchedulingPolicyRegistry = field(default_factory=SchedulingPolicyRegistry)
    pooling: ConverterRegistry = field(default_factory=ConverterRegistry)
    pooling_profiles: PoolingProfileRegistry = field(default_factory=PoolingProfileRegistry)
    pair_renderers: PairRendererRegistry = field(default_factory=PairRendererRegistry)
    checkpoints: CheckpointRegistry = field(default_factory=CheckpointRegistry)
    loaders: LoaderRegistry = field(default_factory=LoaderRegistry)
    quantization: QuantizationRegistry = field(default_factory=QuantizationRegistry)
    commands: CommandRegistry = field(default_factory=CommandRegistry)
    brought: dict[str, Registry[Any]] = field(default_factory=dict)
    """Those that plugins bring together with a hook, by the hook that fills them."""


def by_hook(registries: Registries) -> dict[str, Registry[Any]]:
    """All registries, by the hook that fills them."""
    own = {f"toolkit_register_{name}": one for name, one in vars(registries).items() if isinstance(one, Registry)}
    return own | registries.brought


def copied(registries: Registries, owner: PluginInfo | None, hint: str = "") -> Registries:
    """A copy that takes the entries of `owner`."""
    own: dict[str, Any] = {name: one.copy(owner, hint) for name, one in vars(registries).items() if isinstance(one, Registry)}
    return Registries(**own, brought={hook: one.copy(owner, hint) for hook, one in registries.brought.items()})
