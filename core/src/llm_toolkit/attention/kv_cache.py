"""How the layers' caches are laid out: which layers share block tables, and how many blocks there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from llm_toolkit.attention.spec import KVCacheSpec


class KVGroup(Struct, frozen=True):
    """The layers that share one KVCacheSpec, and so one block table per sequence."""

    spec: KVCacheSpec
    layers: list[str]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.spec.block_bytes * len(self.layers)


class KVCacheConfig(Struct, frozen=True):
    """The whole KV cache of an engine. Groups draw block ids from one pool; a block id is valid in every group's tensors."""

    num_blocks: int
    groups: list[KVGroup]


def group_layers(specs: Mapping[str, KVCacheSpec]) -> list[KVGroup]:
    """The KV groups of a model, in the order of their first layers."""
    by_spec: dict[KVCacheSpec, list[str]] = {}
    for layer, spec in specs.items():
        by_spec.setdefault(spec, []).append(layer)
    return [KVGroup(spec, layers) for spec, layers in by_spec.items()]


def block_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes that one block id takes, over all groups."""
    return sum(group.block_bytes for group in groups)
