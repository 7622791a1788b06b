"""Layers that a compiler sees as one op each: how the op finds its layer, by name, in the model
that is computed.

A layer makes itself an op where its forward pass cannot be traced: a loop that depends on data.
Attention is another such op, and finds its layer in `toolkit_lm.attention`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

_local = threading.local()


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model that have a `prefix`, by it."""
    named = ((getattr(module, "prefix", None), module) for module in model.modules())
    return {name: module for name, module in named if isinstance(name, str)}


@contextmanager
def op_layers(layers: Mapping[str, nn.Module]) -> Iterator[None]:
    """Makes the layers known to the ops that this thread runs inside. A compiler opens it around a
    forward pass."""
    assert getattr(_local, "layers", None) is None, (
        "a compiled forward pass runs inside another one on the same thread"
    )
    _local.layers = layers
    try:
        yield
    finally:
        _local.layers = None


def op_layer(name: str) -> Any:
    """The layer of that name, inside `op_layers`."""
    layers = getattr(_local, "layers", None)
    assert layers is not None, (
        f"layer {name!r} is computed as an op outside of a compiled forward pass"
    )
    return layers[name]
