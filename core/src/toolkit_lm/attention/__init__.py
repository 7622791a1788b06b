"""Attention: what a layer asks, the backend contract, the Attention layer, the selector.

The names are resolved when they are used: what speaks of caches only needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit_lm._lazy import resolver

if TYPE_CHECKING:
    from toolkit_lm.attention.backend import AttentionBackend, AttentionBias, BatchView, GraphSupport
    from toolkit_lm.attention.context import Binding, GroupMetadata, forward_context
    from toolkit_lm.attention.kv_cache import KVCacheConfig, KVGroup, Shape, block_bytes, group_layers, tensors_per_shape
    from toolkit_lm.attention.layer import Attention
    from toolkit_lm.attention.selector import Candidate, Selection, select_backend
    from toolkit_lm.attention.spec import AttentionSpec, AttentionType, KVCacheSpec

_HOMES = {
    "backend": ("AttentionBackend", "AttentionBias", "BatchView", "GraphSupport"),
    "context": ("Binding", "GroupMetadata", "forward_context"),
    "kv_cache": ("KVCacheConfig", "KVGroup", "Shape", "block_bytes", "group_layers", "tensors_per_shape"),
    "layer": ("Attention",),
    "selector": ("Candidate", "Selection", "select_backend"),
    "spec": ("AttentionSpec", "AttentionType", "KVCacheSpec"),
}

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionBias",
    "AttentionSpec",
    "AttentionType",
    "BatchView",
    "Binding",
    "Candidate",
    "GraphSupport",
    "GroupMetadata",
    "KVCacheConfig",
    "KVCacheSpec",
    "KVGroup",
    "Selection",
    "Shape",
    "block_bytes",
    "forward_context",
    "group_layers",
    "select_backend",
    "tensors_per_shape",
]

_resolve = resolver(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return _resolve(name)


def __dir__() -> list[str]:
    return __all__
