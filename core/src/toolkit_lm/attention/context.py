"""ForwardContext: how a layer finds its backend, its cache and the step's metadata: by name, in a
context that is per thread.

This is the one thing that is not handed from caller to callee: a model's forward must not carry the
engine's data through every layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor

from toolkit_lm.attention.backend import CacheBackend

_NONE: Mapping[str, Any] = MappingProxyType({})


class Binding(NamedTuple):
    """The engine's data of one layer. Set once, after the model is loaded."""

    backend: CacheBackend
    params: Any
    """Parameters of the layer for its backend: LayerParams of an attention layer."""
    kv_cache: tuple[Tensor, ...] | None
    """The tensors of the backend's `page_layout`, blocks first; None: it caches nothing."""
    group: int
    """Index of the layer's KV group in the step's metadata."""
    shared: bool = False
    """Its cache is another layer's, which stores what is new in it."""

    @property
    def stores(self) -> bool:
        """Whether the layer's new keys and values are written to its cache."""
        return self.kv_cache is not None and not self.shared


class ForwardContext(NamedTuple):
    """Data that layers share during one step: its forward pass, its logits and the parts' work
    after it."""

    bindings: Mapping[str, Binding]
    """Bindings by layer name."""
    metadata: list[Any]
    """Per KV group, what its backend built."""
    layers: Mapping[str, Any] = _NONE
    """The modules that have a `prefix`, by it: what `op_layer` finds."""
    slots: Mapping[str, Tensor] = _NONE
    """Buffers of the step's parts, by name: one entry per token or row, [most tokens] or [most
    rows]. They stay at fixed addresses. The step uses the beginning."""
    head_tokens: Tensor | None = None
    """The step's flat tokens that language-modeling heads get, indices [R] (int64); None: the last
    of each row."""


_local = threading.local()


@contextmanager
def forward_context(
    context: ForwardContext, within: ForwardContext | None = None
) -> Iterator[None]:
    """Makes `context` known to the layers that this thread runs inside.

    Refuses to nest, but in the one that is named: a second pass of a step runs `within` the first
    one's context.
    """
    assert getattr(_local, "context", None) is within, (
        "a forward pass runs inside another one on the same thread"
    )
    _local.context = context
    try:
        yield
    finally:
        _local.context = within


def _context(who: str) -> ForwardContext:
    context: ForwardContext | None = getattr(_local, "context", None)
    assert context is not None, f"{who} outside a forward_context"
    return context


@contextmanager
def logits_of_tokens(tokens: Tensor) -> Iterator[None]:
    """Context in which language-modeling heads of this thread get these of the step's flat tokens,
    indices [R] (int64), and not the last of each row. Inside a forward_context."""
    context = _context("logits are computed")
    _local.context = context._replace(head_tokens=tokens)
    try:
        yield
    finally:
        _local.context = context


def head_tokens() -> Tensor | None:
    """The `head_tokens` of the forward_context; None outside of one, too."""
    context: ForwardContext | None = getattr(_local, "context", None)
    return None if context is None else context.head_tokens


def current(layer: str) -> tuple[Binding, Any]:
    """The binding of a layer and its group's metadata, inside a forward_context."""
    context = getattr(_local, "context", None)
    assert context is not None, f"layer {layer!r} runs outside a forward_context"
    binding = context.bindings[layer]
    return binding, context.metadata[binding.group]


def op_layer(name: str) -> Any:
    """The layer with that `prefix`, inside a forward_context: how an op finds it.

    A layer makes itself an op where its forward pass cannot be traced: a loop that depends on data.
    To a compiler it is one opaque call, as attention is.
    """
    return _context(f"layer {name!r} is computed as an op").layers[name]


def slots(name: str) -> Tensor:
    """Buffer of that name, which a part fills for each step: one entry per token or row. It stays
    at one address, so graphs and compiled code may keep it. Call it inside a forward_context.

    Raises KeyError if no part of the engine has such a buffer.
    """
    return _context(f"slots {name!r} are read").slots[name]
