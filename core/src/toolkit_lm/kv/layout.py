"""Layout of the layers' caches: which layers share block tables, and which groups of layers share
memory.

A block id belongs to one sequence in one KV group. Groups whose layers have pages of the same size
take their blocks from one pool: a group can use what another leaves free. If the windowed and the
full layers of a model differ in number, they are therefore split into groups of about equal size
(as in "Jenga", Zhang et al. 2025). Exceptions are splits into too many groups, or with too much
unused memory per block. Pages of another size, layers that cannot be split evenly, and layers of
parts, such as a drafter's, have pools of their own: what a part takes would split the model's
layers for nothing, since both keep all tokens.
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
"""Most groups of a pool. Each has a block table per sequence, and its own metadata per step."""
_MOST_WASTE = 0.1
"""Largest share of a pool's pages that no layer uses, because the groups differ in size."""


class KVGroup(Struct, frozen=True):
    """Layers that share one KVCacheSpec and one backend, and therefore one block table per
    sequence."""

    spec: KVCacheSpec
    backend: str
    """Name of the layers' attention backend."""
    layers: list[str]
    pool: int = 0
    """Index of the pool that supplies the group's blocks."""

    @property
    def is_apart(self) -> bool:
        """Whether no layer of this rank sees a step's flat batch: a part's layers run in passes of
        their own."""
        return all("/" in layer for layer in self.layers)


class KVPool(Struct, frozen=True):
    """Blocks of one size. A block has one page per layer of a group."""

    page_bytes: int
    num_pages: int
    """Pages per block: the number of layers of the largest group."""
    num_blocks: int = 0
    num_host_blocks: int = 0
    """Number of blocks in host memory, for preempted requests."""

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.num_pages


class KVCacheConfig(Struct, frozen=True):
    """Layout of an engine's whole KV cache."""

    groups: list[KVGroup]
    pools: list[KVPool]

    @classmethod
    def decode(cls, message: msgspec.Raw, kinds: KVKindRegistry) -> KVCacheConfig:
        """Decodes the msgpack that `msgspec.msgpack.encode` makes. `kinds`: the registered kinds of
        specs."""
        plain: Any = msgspec.msgpack.decode(message)
        for group in plain["groups"]:
            group["spec"] = msgspec.convert(group["spec"], kinds.load(group["spec"]["kind"]))
        return cls(
            [KVGroup(**group) for group in plain["groups"]],
            msgspec.convert(plain["pools"], list[KVPool]),
        )

    def sized(self, num_blocks: Sequence[int], num_host_blocks: Sequence[int]) -> KVCacheConfig:
        """Returns a copy with these numbers of blocks, per pool."""
        sizes = zip(self.pools, num_blocks, num_host_blocks, strict=True)
        return KVCacheConfig(
            self.groups, [KVPool(pool.page_bytes, pool.num_pages, *size) for pool, *size in sizes]
        )

    @property
    def without_prefixes(self) -> KVGroup | None:
        """A group whose blocks no other sequence can use, so that there is no prefix caching. None:
        there is no such group."""
        without = (g for g in self.groups if not (g.spec.of_encoder or g.spec.shares_prefixes))
        return next(without, None)

    def of_layers(self, layers: Container[str]) -> KVCacheConfig:
        """Returns the config for a worker that runs only these layers. The groups stay the same, so
        that a plan's block tables fit all workers."""
        groups = [
            replace(group, layers=[layer for layer in group.layers if layer in layers])
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
        """Most blocks, per pool, that a sequence of `num_tokens` holds at a time if a step computes
        at most `chunk` of them.

        The blocks of its encoder sequence are included.
        """
        counts = [0] * len(self.pools)
        for group in self.groups:
            counts[group.pool] += group.spec.max_blocks(
                num_encoder_tokens if group.spec.of_encoder else num_tokens, chunk + group.spec.lag
            )
        return counts


def plan_groups(specs: Mapping[str, KVCacheSpec], backends: Mapping[str, str]) -> KVCacheConfig:
    """Plans the KV groups of a model, in the order of their first layers, and their pools, still
    without blocks. Both mappings are by layer."""
    alike: dict[tuple[KVCacheSpec, str, bool], list[str]] = {}
    for layer, spec in specs.items():
        alike.setdefault((spec, backends[layer], "/" in layer), []).append(layer)
    sharing: dict[tuple[int, bool], list[int]] = {}
    """Numbers of equal layers, by page size, and whether they are a part's."""
    for (spec, _, is_part), layers in alike.items():
        sharing.setdefault((spec.page_bytes, is_part), []).append(len(layers))
    sizes = {kind: _group_size(counts) for kind, counts in sharing.items()}
    groups: list[KVGroup] = []
    pools: dict[tuple[int, int, bool], int] = {}
    for (spec, backend, is_part), layers in alike.items():
        size = sizes[spec.page_bytes, is_part] or len(layers)
        pool = pools.setdefault((spec.page_bytes, size, is_part), len(pools))
        parts = -(-len(layers) // size)
        groups += [KVGroup(spec, backend, layers[i::parts], pool) for i in range(parts)]
    return KVCacheConfig(groups, [KVPool(page_bytes, size) for page_bytes, size, _ in pools])


def _group_size(counts: Sequence[int]) -> int | None:
    """Number of layers per group if groups of these `counts` of equal layers share a pool. None:
    separate pools are better."""
    total = sum(counts)
    for size in range(max(counts), 0, -1):
        num_groups = sum(-(-count // size) for count in counts)
        if (
            num_groups <= max(_MOST_GROUPS, len(counts))
            and num_groups * size <= (1 + _MOST_WASTE) * total
        ):
            return size
    return None
