"""How the layers' caches are laid out: which layers share block tables, and which groups of layers
share memory.

A block id belongs to one sequence in one KV group. Groups whose layers have pages of one size draw
their blocks from one pool: what one group does not use, another can. A model whose windowed and
full layers differ in number is therefore cut into groups of about equal size (as in "Jenga", Zhang
et al. 2025), unless these would be too many, or leave too much of a block unused. Pages of another
size, and layers that cannot be cut evenly, have a pool of their own.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from toolkit_lm.kv.spec import KVCacheSpec
from toolkit_lm.plugin import KVKindRegistry

_MOST_GROUPS = 8
"""Of one pool: each has a block table per sequence, and its own metadata per step."""
_MOST_WASTE = 0.1
"""Of a pool's pages: those that no layer uses, because its groups differ in size."""


class KVGroup(Struct, frozen=True):
    """Layers that share one KVCacheSpec and one backend, and so one block table per sequence."""

    spec: KVCacheSpec
    backend: str
    """Name of the layers' attention backend."""
    layers: list[str]
    pool: int = 0
    """Index of the pool that its blocks are from."""


class KVPool(Struct, frozen=True):
    """Blocks of one size. A block has a page for each layer of a group."""

    page_bytes: int
    num_pages: int
    """Pages of a block: the layers of the largest group."""
    num_blocks: int = 0
    num_host_blocks: int = 0
    """In host memory, which preempted requests are swapped to."""

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.num_pages


class KVCacheConfig(Struct, frozen=True):
    """The whole KV cache of an engine."""

    groups: list[KVGroup]
    pools: list[KVPool]

    @classmethod
    def decode(cls, message: msgspec.Raw, kinds: KVKindRegistry) -> KVCacheConfig:
        """From msgpack, as `msgspec.msgpack.encode` makes it. `kinds`: those of its specs."""
        plain: Any = msgspec.msgpack.decode(message)
        for group in plain["groups"]:
            group["spec"] = msgspec.convert(group["spec"], kinds.load(group["spec"]["kind"]))
        return cls(
            [KVGroup(**group) for group in plain["groups"]],
            msgspec.convert(plain["pools"], list[KVPool]),
        )

    def sized(self, num_blocks: Sequence[int], num_host_blocks: Sequence[int]) -> KVCacheConfig:
        """A copy with so many blocks in each pool."""
        sizes = zip(self.pools, num_blocks, num_host_blocks, strict=True)
        return KVCacheConfig(
            self.groups, [KVPool(pool.page_bytes, pool.num_pages, *size) for pool, *size in sizes]
        )

    def of_layers(self, layers: Container[str]) -> KVCacheConfig:
        """What a worker has of it that runs only these layers. Its groups are the same, so that a
        plan's block tables fit all workers."""
        groups = [
            replace(group, layers=[one for one in group.layers if one in layers])
            for group in self.groups
        ]
        counts = [
            max(len(group.layers) for group in groups if group.pool == pool)
            for pool in range(len(self.pools))
        ]
        return KVCacheConfig(
            groups,
            [
                replace(pool, num_pages=count)
                for pool, count in zip(self.pools, counts, strict=True)
            ],
        )

    def max_blocks(self, num_tokens: int, chunk: int, num_encoder_tokens: int = 0) -> list[int]:
        """Per pool, most blocks that a sequence of `num_tokens` holds at a time when a step
        computes at most `chunk` of them.

        And those of its encoder sequence.
        """
        counts = [0] * len(self.pools)
        for group in self.groups:
            counts[group.pool] += group.spec.max_blocks(
                num_encoder_tokens if group.spec.of_encoder else num_tokens, chunk + group.spec.lag
            )
        return counts


def plan_groups(specs: Mapping[str, KVCacheSpec], backends: Mapping[str, str]) -> KVCacheConfig:
    """The KV groups of a model, in the order of their first layers, and their pools without blocks.
    Both mappings are by layer."""
    alike: dict[tuple[KVCacheSpec, str], list[str]] = {}
    for layer, spec in specs.items():
        alike.setdefault((spec, backends[layer]), []).append(layer)
    sharing: dict[int, list[int]] = {}
    """By page size, the numbers of layers that are alike."""
    for (spec, _), layers in alike.items():
        sharing.setdefault(spec.page_bytes, []).append(len(layers))
    sizes = {page_bytes: _group_size(counts) for page_bytes, counts in sharing.items()}
    groups: list[KVGroup] = []
    pools: dict[tuple[int, int], int] = {}
    for (spec, backend), layers in alike.items():
        size = sizes[spec.page_bytes] or len(layers)
        pool = pools.setdefault((spec.page_bytes, size), len(pools))
        parts = -(-len(layers) // size)
        groups += [KVGroup(spec, backend, layers[i::parts], pool) for i in range(parts)]
    return KVCacheConfig(groups, [KVPool(page_bytes, size) for page_bytes, size in pools])


def _group_size(counts: Sequence[int]) -> int | None:
    """Layers of a group where layers that are alike, so many of each sort, share a pool. None: they
    are better off apart."""
    total = sum(counts)
    for size in range(max(counts), 0, -1):
        num_groups = sum(-(-count // size) for count in counts)
        if (
            num_groups <= max(_MOST_GROUPS, len(counts))
            and num_groups * size <= (1 + _MOST_WASTE) * total
        ):
            return size
    return None
