"""How an Attention layer finds its backend, its cache and the step's metadata: by name, in a context that is per thread.

This is the one thing that is not handed from caller to callee: a model's forward must not carry the engine's data through every layer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from toolkit_lm.attention.backend import AttentionBackend


class Binding(NamedTuple):
    """What the engine gave to a layer, once."""

    backend: AttentionBackend
    kv_cache: Tensor | None
    group: int
    """Index of the layer's KV group in the step's metadata."""


class GroupMetadata(NamedTuple):
    """One KV group's part of a step."""

    meta: Any
    """What the group's backend built."""
    slot_mapping: Tensor | None
    """[T] int64; None where nothing is cached."""


_local = threading.local()


@contextmanager
def forward_context(bindings: Mapping[str, Binding], groups: Sequence[GroupMetadata]) -> Iterator[None]:
    """Makes `bindings` (by layer name) and `groups` known to the Attention layers that this thread runs inside. Refuses to nest."""
    assert getattr(_local, "state", None) is None, "a forward pass runs inside another one on the same thread"
    _local.state = (bindings, groups)
    try:
        yield
    finally:
        _local.state = None


def current(layer: str) -> tuple[Binding, GroupMetadata]:
    """The binding and metadata of a layer, inside a forward_context."""
    state = getattr(_local, "state", None)
    assert state is not None, f"attention layer {layer!r} runs outside a forward_context"
    bindings, groups = state
    binding = bindings[layer]
    return binding, groups[binding.group]
