"""Attention: what a layer asks, the backend contract, the Attention layer, the selector."""

from llm_toolkit.attention.backend import AttentionBackend, AttentionBias, BatchView, GraphSupport
from llm_toolkit.attention.context import Binding, GroupMetadata, forward_context
from llm_toolkit.attention.kv_cache import KVCacheConfig, KVGroup, Shape, block_bytes, group_layers, tensors_per_shape
from llm_toolkit.attention.layer import Attention
from llm_toolkit.attention.selector import Candidate, Selection, select_backend
from llm_toolkit.attention.spec import AttentionSpec, AttentionType, KVCacheSpec

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
