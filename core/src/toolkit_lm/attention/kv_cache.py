"""How the layers' caches are laid out: which layers share block tables, and which groups share memory.

A block id belongs to one sequence in one group. Groups of like shape keep their keys and values in the same tensors, the first layer of
each in the first, and so on: what one group does not use, another can. A model whose windowed and full layers differ in number is
therefore cut into groups of about equal size (as in "Jenga", Zhang et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from toolkit_lm.attention.spec import KVCacheSpec

_MOST_GROUPS = 8
"""Of one shape: each has a block table per sequence, and its own metadata per step."""


class Shape(NamedTuple):
    """Groups of equal shape share memory."""

    backend: str
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str


class KVGroup(Struct, frozen=True):
    """Layers that share one KVCacheSpec and one backend, and so one block table per sequence."""

    spec: KVCacheSpec
    backend: str
    """Name of the layers' attention backend."""
    layers: list[str]

    @property
    def shape(self) -> Shape:
        spec = self.spec
        return Shape(self.backend, spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype)


class KVCacheConfig(Struct, frozen=True):
    """The whole KV cache of an engine. Groups draw block ids from one pool; a block id is valid in every group's tensors."""

    num_blocks: int
    groups: list[KVGroup]
    num_host_blocks: int = 0
    """Of the pool in host memory that preempted requests are swapped to."""


def group_layers(specs: Mapping[str, KVCacheSpec], backends: Mapping[str, str]) -> list[KVGroup]:
    """The KV groups of a model, in the order of their first layers. Both mappings are by layer."""
    alike: dict[tuple[KVCacheSpec, str], list[str]] = {}
    for layer, spec in specs.items():
        alike.setdefault((spec, backends[layer]), []).append(layer)
    whole = [KVGroup(spec, backend, layers) for (spec, backend), layers in alike.items()]
    return [part for group in whole for part in _split(group, [g for g in whole if g.shape == group.shape])]


def _split(group: KVGroup, sharing: Sequence[KVGroup]) -> list[KVGroup]:
    """`group` in parts of the size of the smallest group that shares its memory, but not in too many."""
    counts = [len(g.layers) for g in sharing]
    size = max(min(counts), -(-sum(counts) // _MOST_GROUPS))
    parts = -(-len(group.layers) // size)
    return [KVGroup(group.spec, group.backend, group.layers[i::parts]) for i in range(parts)]


def tensors_per_shape(groups: Sequence[KVGroup]) -> dict[Shape, int]:
    """How many cache tensors the groups of each shape share: as many as the largest of them has layers."""
    counts: dict[Shape, int] = {}
    for group in groups:
        counts[group.shape] = max(counts.get(group.shape, 0), len(group.layers))
    return counts


def block_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes that one block id takes, over all tensors."""
    counts = tensors_per_shape(groups)
    return sum({group.shape: group.spec.block_bytes * counts[group.shape] for group in groups}.values())
