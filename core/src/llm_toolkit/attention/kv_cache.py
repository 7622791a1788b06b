"""How the layers' caches are laid out: which layers share block tables, and how many blocks there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from llm_toolkit.attention.spec import KVCacheSpec


class KVGroup(Struct, frozen=True):
    """The layers that share one KVCacheSpec and one backend, and so one block table per sequence."""

    spec: KVCacheSpec
    backend: str
    """Name of the layers' attention backend."""
    layers: list[str]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return self.spec.block_bytes * len(self.layers)


class KVCacheConfig(Struct, frozen=True):
    """The whole KV cache of an engine. Groups draw block ids from one pool; a block id is valid in every group's tensors."""

    num_blocks: int
    groups: list[KVGroup]


def group_layers(specs: Mapping[str, KVCacheSpec], backends: Mapping[str, str]) -> list[KVGroup]:
    """The KV groups of a model, in the order of their first layers. Both mappings are by layer."""
    groups: dict[tuple[KVCacheSpec, str], list[str]] = {}
    for layer, spec in specs.items():
        groups.setdefault((spec, backends[layer]), []).append(layer)
    return [KVGroup(spec, backend, layers) for (spec, backend), layers in groups.items()]


def block_bytes(groups: Sequence[KVGroup]) -> int:
    """Bytes that one block id takes, over all groups."""
    return sum(group.block_bytes for group in groups)
