"""Which attention backend runs each of a model's layers."""

from __future__ import annotations

import torch
from torch import nn

from llm_toolkit.attention import Attention, AttentionType, Selection, select_backend
from llm_toolkit.errors import CheckpointError, UnsupportedError
from llm_toolkit.plugin import AttentionBackendRegistry


def select_backends(
    model: nn.Module, device: torch.device, registry: AttentionBackendRegistry, wanted: str = "auto"
) -> dict[str, Selection]:
    """By layer name, for every Attention layer of the model. Raises UnsupportedError, naming the layer and the reasons."""
    selections: dict[str, Selection] = {}
    for layer in attention_layers(model).values():
        if layer.attention_type is not AttentionType.DECODER or layer.spans:
            what = "bidirectional spans" if layer.spans else f"attention of type {layer.attention_type!r}"
            raise UnsupportedError(
                f"layer {layer.prefix!r} has {what}, which the runner 'generate' cannot feed. Able: causal decoder layers."
            )
        selections[layer.prefix] = select_backend(layer.spec(device), registry, wanted)
    return selections


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """By name. Raises CheckpointError when two have the same name."""
    layers: dict[str, Attention] = {}
    for layer in (m for m in model.modules() if isinstance(m, Attention)):
        if layer.prefix in layers:
            raise CheckpointError(f"the model names two attention layers {layer.prefix!r}: each needs its own prefix.")
        layers[layer.prefix] = layer
    return layers
