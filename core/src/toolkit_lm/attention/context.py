"""How a layer finds its backend, its cache and the step's metadata: by name, in a context that is
per thread.

This is the one thing that is not handed from caller to callee: a model's forward must not carry the
engine's data through every layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from toolkit_lm.attention.backend import CacheBackend


class Binding(NamedTuple):
    """What the engine gave to a layer, once."""

    backend: CacheBackend
    params: Any
    """What the backend is told of the layer: LayerParams of attention."""
    kv_cache: tuple[Tensor, ...] | None
    """The tensors of the backend's `page_layout`, blocks first; None: it caches nothing."""
    group: int
    """Index of the layer's KV group in the step's metadata."""


class StepContext(NamedTuple):
    """What the layers of a model share in one step."""

    bindings: Mapping[str, Binding]
    """By layer name."""
    metadata: Sequence[Any]
    """Per KV group, what its backend built."""


_local = threading.local()


@contextmanager
def step_context(context: StepContext) -> Iterator[None]:
    """Makes `context` known to the layers that this thread runs inside. Refuses to nest."""
    assert getattr(_local, "context", None) is None, (
        "a forward pass runs inside another one on the same thread"
    )
    _local.context = context
    try:
        yield
    finally:
        _local.context = None


def current(layer: str) -> tuple[Binding, Any]:
    """The binding of a layer and its group's metadata, inside a step_context."""
    context = getattr(_local, "context", None)
    assert context is not None, f"layer {layer!r} runs outside a step_context"
    binding = context.bindings[layer]
    return binding, context.metadata[binding.group]
