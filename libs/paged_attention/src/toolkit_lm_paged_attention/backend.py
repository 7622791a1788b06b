"""PagedBackend, and the metadata that its subclasses build for a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from toolkit_lm.attention import AttentionBackend, AttentionCall, BatchView, GroupSetup
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
from torch import Tensor

from toolkit_lm_paged_attention.places import halves, key_places

Key = TypeVar("Key", bound=Hashable)
Plan = TypeVar("Plan")


class Store(NamedTuple):
    """Places at which a step stores S keys. A value lies block_size after its key."""

    tokens: Tensor | None
    """[S] int64: the tokens that are stored, as indices of `AttentionCall.k`. None: all, in
    order."""
    places: Tensor
    """[S] int64: indices of the keys in the cache, which is seen as vectors [num_blocks * 2 *
    block_size, num_kv_heads, head_size]."""


@dataclass(frozen=True, slots=True)
class PagedStep:
    """Metadata of one step. Plans are made by the first layer that needs them: the batch knows
    neither windows nor head counts."""

    batch: BatchView
    store: Store | None
    """None: nothing is cached, or the backend stores it otherwise."""
    _plans: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def plan(self, key: Key, make: Callable[[BatchView, Key], Plan]) -> Plan:
        """Returns `make(batch, key)`, which is called once for each key."""
        plan: Plan | None = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make(self.batch, key)
        return plan


class PagedBackend(AttentionBackend):
    """Base of backends whose page holds (2, block_size, num_kv_heads, head_size), keys before
    values, and the scales of a quantized cache after them.

    A subclass defines `refuses` and `forward`. What its `build` returns has the field `store`,
    unless the subclass writes keys and values itself.
    """

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        self._fixed_stores: dict[int, Store] = {}
        """Stores that CUDA graphs read, by the number of tokens."""

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, FullSpec)
        heads = (2, spec.block_size, spec.num_kv_heads)
        page = [PageTensor((*heads, spec.head_size), spec.dtype)]
        return [*page, PageTensor(heads, "float32")] if spec.scales == "token" else page

    def build(self, batch: BatchView) -> Any:
        return PagedStep(batch, self.store(batch))

    def store(self, batch: BatchView) -> Store | None:
        """Places of the step's keys. None: nothing is cached.

        Those of a step in a CUDA graph lie where they lay in earlier ones of as many tokens, and
        are found without waiting for the device.
        """
        cache = self.setup.kv_cache
        slots = batch.slot_mapping
        if slots is None or cache is None:
            return None
        if batch.is_fixed:
            return self._fixed_store(slots, cache.block_size)
        if not batch.has_padding:
            return Store(None, key_places(slots, cache.block_size))
        tokens = slots.ge(0).nonzero()[:, 0]
        return Store(tokens, key_places(slots[tokens], cache.block_size))

    def _fixed_store(self, slots: Tensor, block_size: int) -> Store:
        """A token of padding stores again what another token stores."""
        is_stored = slots >= 0
        own = torch.arange(len(slots), device=slots.device)
        tokens = torch.where(is_stored, own, is_stored.int().argmax())
        places = key_places(slots[tokens], block_size)
        kept = self._fixed_stores.get(len(slots))
        if kept is None:
            kept = self._fixed_stores[len(slots)] = Store(tokens, places)
        elif kept.tokens is not None:
            kept.tokens.copy_(tokens)
            kept.places.copy_(places)
        return kept

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.v is not None and call.kv_cache is not None
        store: Store = call.metadata.store
        keys, values = halves(call.kv_cache)
        k = call.k
        v = call.v
        if store.tokens is not None:
            k, v = k[store.tokens], v[store.tokens]
        keys.index_copy_(0, store.places, k)
        values.index_copy_(0, store.places, v)
