"""Which class a model is of, and which attention backend runs each of its layers."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch import nn

from toolkit_lm.attention import CacheLayer, GraphSupport, Selection
from toolkit_lm.attention.selector import check_kinds
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import Model
from toolkit_lm.plugin import AttentionBackendRegistry, Plugins
from toolkit_lm.plugin.boundary import Boundary
from toolkit_lm.runner.device import on_device
from toolkit_lm.step import Feed

_CACHE = "the KV cache"
_NEEDS: dict[Feed, str] = {
    "sequences": "whole sequences",
    "encoder_cache": "the KV cache of an encoder sequence",
}
"""What layers may need of the parts of a step."""


def select_backends(
    layers: Mapping[str, CacheLayer],
    device: torch.device,
    config: VllmConfig,
    registry: AttentionBackendRegistry,
    feeds: Collection[Feed] = (),
) -> dict[str, Selection]:
    """By name, for each of these layers. `feeds`: what parts of the step see to.
    Raises UnsupportedError, naming the layer and the reasons."""
    selections: dict[str, Selection] = {}
    pools = config.model.runner == "pooling"
    given = [_CACHE] + [
        need for feed, need in _NEEDS.items() if feed in feeds or (pools and feed == "sequences")
    ]
    wanted = config.attention.attention_backend
    asked = (layer.attention_spec(device, cached=False) for layer in layers.values())
    check_kinds(wanted, (str(spec.type) for spec in asked if spec is not None))
    for layer in layers.values():
        if (need := _need(layer)) not in given:
            raise UnsupportedError(
                f"layer {layer.prefix!r} needs {need}, which this engine does not give. "
                f"Supported: layers that need {' or '.join(given)}."
            )
        with on_device(device):
            # What a GPU can do is asked of the current one.
            selections[layer.prefix] = layer.select(
                device, registry, wanted, cached=config.keeps_kv_cache
            )
        if layer.shares_with is not None:
            _check_shared(layer, selections, layers.get(layer.shares_with))
    return selections


def _check_shared(
    layer: CacheLayer, selections: Mapping[str, Selection], of: CacheLayer | None
) -> None:
    """Raises UnsupportedError where a layer cannot read the cache of the one that it names."""
    why = None
    if of is None or of.prefix not in selections:
        why = "which is no layer before it on its pipeline stage"
    elif of.shares_with is not None:
        why = f"which has none of its own: it shares that of {of.shares_with!r}"
    elif of.kv_cache_spec() != layer.kv_cache_spec():
        why = f"which keeps something else: {of.kv_cache_spec()}, not {layer.kv_cache_spec()}"
    elif selections[of.prefix].backend is not selections[layer.prefix].backend:
        why = f"which another backend runs: {selections[of.prefix].name}"
    if why is not None:
        raise UnsupportedError(
            f"layer {layer.prefix!r} shares the KV cache of {layer.shares_with!r}, {why}."
        )


def _need(layer: CacheLayer) -> str:
    """What a layer computes from beside its inputs."""
    spec = layer.kv_cache_spec()
    if spec is None:
        return _NEEDS["sequences"]
    return _NEEDS["encoder_cache"] if spec.of_encoder else _CACHE


def graph_supports(
    selections: Mapping[str, Selection], cached: Container[str], feeds_uncached: bool
) -> dict[str, GraphSupport | str]:
    """By backend, the least that its layers allow; a text says why they allow nothing.

    `selections` and `cached` are of layers. `feeds_uncached`: the forward pass runs layers that
    cache nothing, too.
    """
    supports: dict[str, GraphSupport | str] = {}
    for layer, selection in selections.items():
        if layer in cached or feeds_uncached:
            found = selection.graphs if layer in cached else f"{layer} caches nothing"
            supports[selection.name] = min(
                supports.get(selection.name, GraphSupport.ALWAYS), found, key=GraphSupport.of
            )
    return supports


def load_model_class(config: VllmConfig, plugins: Plugins) -> type[Model]:
    """The class that is registered for the checkpoint, or what the config's pooling adapters make
    of it. Raises UnsupportedError."""
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    model_class: type[Model] = plugins.models.load(config.checkpoint.architecture)
    convert = config.model.convert
    for adapter in config.model.extra_tasks if convert in ("auto", "none") else [convert]:
        model_class = plugins.pooling.make(adapter, model_class, config)
    return model_class


def boundary_of(target: type, plugin: str | None, config: VllmConfig, plugins: Plugins) -> Boundary:
    """For calls of a class: of a plugin, by its name, or (None) of the one that registers the
    model's class."""
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    if plugin is None and architecture not in plugins.models:
        return plugins.boundary
    owner = plugins.models.get(architecture).owner if plugin is None else plugins.info(plugin)
    return plugins.boundary_of(owner, target)


def model_options(config: VllmConfig, plugins: Plugins) -> Any:
    """Those of the plugin that registers the model's class; None where it has none."""
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    if architecture not in plugins.models:
        return None
    return plugins.options(plugins.models.get(architecture).owner.name)


def cache_layers(model: nn.Module) -> dict[str, CacheLayer]:
    """By name. Raises CheckpointError when two have the same name."""
    layers: dict[str, CacheLayer] = {}
    for layer in (m for m in model.modules() if isinstance(m, CacheLayer)):
        if layer.prefix in layers:
            raise CheckpointError(
                f"the model names two layers {layer.prefix!r}: each needs its own prefix."
            )
        layers[layer.prefix] = layer
    return layers
