"""Which class a model is of, and which attention backend runs each of its layers."""

from __future__ import annotations

import torch
from torch import nn

from toolkit_lm.attention import Attention, AttentionType, Selection, select_backend
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError, UnsupportedError
from toolkit_lm.model import Model
from toolkit_lm.plugin import AttentionBackendRegistry, Plugins

_FED = {
    "generate": (AttentionType.DECODER,),
    "pooling": (AttentionType.DECODER, AttentionType.ENCODER),
}
"""By runner type, the attention types whose inputs the runner makes."""


def select_backends(model: nn.Module, device: torch.device, config: VllmConfig, registry: AttentionBackendRegistry) -> dict[str, Selection]:
    """By layer name, for every Attention layer of the model. Raises UnsupportedError, naming the layer and the reasons."""
    selections: dict[str, Selection] = {}
    runner = "pooling" if config.model.runner == "pooling" else "generate"
    for layer in attention_layers(model).values():
        if layer.params.attention_type not in _FED[runner] or layer.params.spans:
            what = "bidirectional spans" if layer.params.spans else f"attention of type {layer.params.attention_type.value!r}"
            raise UnsupportedError(
                f"layer {layer.prefix!r} has {what}, which the runner {runner!r} cannot feed. "
                f"Supported: layers of type {' or '.join(type.value for type in _FED[runner])}."
            )
        selections[layer.prefix] = select_backend(layer.spec(device), registry, config.attention.attention_backend)
    return selections


def load_model_class(config: VllmConfig, plugins: Plugins) -> type[Model]:
    """The class that is registered for the checkpoint, or what the config's pooling adapter makes of it. Raises UnsupportedError."""
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    model_class: type[Model] = plugins.models.load(config.checkpoint.architecture)
    if config.model.convert in ("auto", "none"):
        return model_class
    converted: type[Model] = plugins.pooling.make(config.model.convert, model_class, config)
    return converted


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """By name. Raises CheckpointError when two have the same name."""
    layers: dict[str, Attention] = {}
    for layer in (m for m in model.modules() if isinstance(m, Attention)):
        if layer.prefix in layers:
            raise CheckpointError(f"the model names two attention layers {layer.prefix!r}: each needs its own prefix.")
        layers[layer.prefix] = layer
    return layers
