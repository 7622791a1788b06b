"""Selection of a checkpoint's model class, and of an attention backend for each of its layers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Container, Mapping
from typing import Any

import torch
from torch import nn

from toolkit_lm.attention import CacheLayer, GraphSupport, Selection
from toolkit_lm.attention.selector import check_kinds
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import Kernels, Model
from toolkit_lm.plugin import AttentionBackendRegistry, Plugins
from toolkit_lm.plugin.boundary import Boundary
from toolkit_lm.runner.device import on_device
from toolkit_lm.step import Feed

logger = logging.getLogger(__name__)

_CACHE = "the KV cache"
_NEEDS: dict[Feed, str] = {
    "sequences": "whole sequences",
    "encoder_cache": "the KV cache of an encoder sequence",
}
"""Requirements of layers that parts of the step must meet, in words for errors."""


def select_backends(
    layers: Mapping[str, CacheLayer],
    device: torch.device,
    config: VllmConfig,
    registry: AttentionBackendRegistry,
    feeds: Collection[Feed] = (),
) -> dict[str, Selection]:
    """Selects a backend for each of these layers, by layer name. `feeds`: the requirements of
    layers that parts of the step meet. Raises UnsupportedError, with the layer and the reasons."""
    selections: dict[str, Selection] = {}
    pools = config.model.runner == "pooling"
    provided = [_CACHE] + [
        need for feed, need in _NEEDS.items() if feed in feeds or (pools and feed == "sequences")
    ]
    wanted = config.attention.attention_backend
    asked = (layer.attention_spec(device, cached=False) for layer in layers.values())
    check_kinds(wanted, (str(spec.type) for spec in asked if spec is not None))
    for layer in layers.values():
        if (need := _need(layer)) not in provided:
            raise UnsupportedError(
                f"layer {layer.prefix!r} needs {need}, which this engine does not give. "
                f"Supported: layers that need {' or '.join(provided)}."
            )
        with on_device(device):
            # torch queries the current GPU for its capabilities.
            selections[layer.prefix] = layer.select(
                device, registry, wanted, cached=config.keeps_kv_cache
            )
        if layer.shares_with is not None:
            _check_shared(layer, selections, layers.get(layer.shares_with))
    return selections


def warn_of_bits(kernels: Kernels, selections: Mapping[str, Selection]) -> None:
    """Warns if the kernels are batch invariant, and a layer's backend, which the user has not
    named, is not."""
    for layer, selection in selections.items() if kernels.batch_invariant else ():
        refused = [f"{name}: {why}" for name, why in selection.candidates if why is not None]
        if refused and not selection.backend.batch_invariant:
            logger.warning(
                "layer %r runs on attention backend %r: the last bits of its results depend on the "
                "rest of the batch, and on how much of a prompt is cached (%s). See "
                "https://toolkit-lm.readthedocs.io/en/latest/determinism/",
                layer,
                selection.name,
                refused[0],
            )
            return


def _check_shared(
    layer: CacheLayer, selections: Mapping[str, Selection], owner: CacheLayer | None
) -> None:
    """Raises UnsupportedError if a layer cannot read the cache of the layer that it names."""
    why = None
    if owner is None or owner.prefix not in selections:
        why = "which is no layer before it on its pipeline stage"
    elif owner.shares_with is not None:
        why = f"which has none of its own: it shares that of {owner.shares_with!r}"
    elif owner.keeps != layer.keeps:
        why = f"which keeps something else: {owner.keeps}, not {layer.keeps}"
    elif selections[owner.prefix].backend is not selections[layer.prefix].backend:
        why = f"which another backend runs: {selections[owner.prefix].name}"
    if why is not None:
        raise UnsupportedError(
            f"layer {layer.prefix!r} shares the KV cache of {layer.shares_with!r}, {why}."
        )


def _need(layer: CacheLayer) -> str:
    """Describes what a layer needs in addition to its inputs, for an error."""
    spec = layer.keeps
    if spec is None:
        return _NEEDS["sequences"]
    return _NEEDS["encoder_cache"] if spec.of_encoder else _CACHE


def graph_supports(
    selections: Mapping[str, Selection], cached: Container[str], feeds_uncached: bool
) -> dict[str, GraphSupport | str]:
    """Returns the weakest graph support of each backend's layers, by backend. A text is the reason
    for no support at all.

    `selections` and `cached` are by layer. `feeds_uncached`: the forward pass also runs layers that
    cache nothing.
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
    """Returns the class that is registered for the checkpoint, converted by the config's pooling
    adapters. Raises UnsupportedError."""
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    model_class: type[Model] = plugins.models.load(config.checkpoint.architecture)
    convert = config.model.convert
    for adapter in config.model.extra_tasks if convert in ("auto", "none") else [convert]:
        model_class = plugins.pooling.make(adapter, model_class, config)
    return model_class


def boundary_of(target: type, plugin: str | None, config: VllmConfig, plugins: Plugins) -> Boundary:
    """Returns the error boundary for calls of a class. `plugin`: name of the class's plugin; None:
    the plugin that registers the model's class."""
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    if plugin is None and architecture not in plugins.models:
        return plugins.boundary
    owner = plugins.models.get(architecture).owner if plugin is None else plugins.info(plugin)
    return plugins.boundary_of(owner, target)


def model_options(config: VllmConfig, plugins: Plugins) -> Any:
    """Options of the plugin that registers the model's class; None: it has none."""
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    if architecture not in plugins.models:
        return None
    return plugins.options(plugins.models.get(architecture).owner.name)


def cache_layers(model: nn.Module) -> dict[str, CacheLayer]:
    """The model's layers that use a cache, by name. Raises CheckpointError if two have the same
    name."""
    layers: dict[str, CacheLayer] = {}
    for layer in (m for m in model.modules() if isinstance(m, CacheLayer)):
        if layer.prefix in layers:
            raise CheckpointError(
                f"the model names two layers {layer.prefix!r}: each needs its own prefix."
            )
        layers[layer.prefix] = layer
    return layers
