"""A KV cache in int8, with a scale for each token and head: the kinds of its pages, and a backend
that reads them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from msgspec.structs import asdict, replace
from toolkit_lm.attention import AttentionCall, AttentionSpec, BatchView
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor, WindowSpec
from toolkit_lm_paged_attention import PagedStep
from toolkit_lm_sdpa.backend import SdpaBackend
from torch import Tensor

SCALE_BYTES = 4


class Int8FullSpec(FullSpec, frozen=True, kw_only=True, tag="int8_full"):
    """Keys and values of all tokens in int8, and their scales in float32."""

    @property
    def page_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * (self.head_size + SCALE_BYTES)


class Int8WindowSpec(WindowSpec, frozen=True, kw_only=True, tag="int8_window"):
    """Those of the last `window` tokens."""

    page_bytes = Int8FullSpec.page_bytes


KINDS: dict[type[KVCacheSpec], type[FullSpec]] = {
    FullSpec: Int8FullSpec,
    WindowSpec: Int8WindowSpec,
}
"""Plain kind -> the kind that keeps the same tokens in int8."""


def in_int8(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec of a layer that keeps in int8 what it would keep as `spec`. Other kinds than those
    of keys and values of a decoder stay as they are."""
    kind = KINDS.get(type(spec))
    return spec if kind is None else kind(**asdict(spec) | {"dtype": "int8"})


def quantize_heads(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, heads, head_size] -> int8 of that shape, and scales [T, heads] float32."""
    x = x.float()
    scales = x.abs().amax(-1).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (x / scales[..., None]).round().to(torch.int8), scales


def round_trip(x: Tensor) -> Tensor:
    """What the cache gives back for keys or values [T, heads, head_size], in their dtype."""
    values, scales = quantize_heads(x)
    return (values * scales[..., None]).to(x.dtype)


class Step(NamedTuple):
    """Metadata of a step."""

    written: BatchView
    """The step with the cache's own block ids."""
    blocks: Tensor
    """[N] int64: ids of the blocks that the step reads."""
    plan: PagedStep
    """sdpa's, whose block ids are indices of `blocks`."""


class Int8Backend(SdpaBackend):
    """sdpa on the blocks that a step reads, made floats in each layer. What a step brings is seen
    as it is stored, so that the cuts of a prompt change nothing."""

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        cache = spec.kv_cache
        if not isinstance(cache, Int8FullSpec | Int8WindowSpec):
            return "only for a cache in int8 with a scale for each token and head"
        return SdpaBackend.refuses(replace(spec, kv_cache=replace(cache, dtype=spec.dtype)))

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, FullSpec)
        heads = (2, spec.block_size, spec.num_kv_heads)
        return [PageTensor((*heads, spec.head_size), "int8"), PageTensor(heads, "float32")]

    def build(self, batch: BatchView) -> Step:  # type: ignore[override]
        assert batch.block_table is not None
        blocks, table = torch.unique(batch.block_table, return_inverse=True)
        read = dataclasses.replace(batch, block_table=table.to(batch.block_table.dtype))
        return Step(batch, blocks.long(), super().build(read))

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.v is not None and call.kv_cache is not None
        slots: Tensor = call.metadata.written.slot_mapping
        stored = slots.ge(0).nonzero()[:, 0]
        values, scales = call.kv_cache
        size = values.shape[2]
        block = slots[stored] // size
        offset = slots[stored] % size
        for half, x in enumerate((call.k, call.v)):
            values[block, half, offset], scales[block, half, offset] = quantize_heads(x[stored])

    def forward(self, call: AttentionCall) -> None:
        step: Step = call.metadata
        assert call.kv_cache is not None
        values, scales = (tensor[step.blocks] for tensor in call.kv_cache)
        cache = ((values * scales[..., None]).to(call.q.dtype),)
        kept: dict[str, object] = {"metadata": step.plan, "kv_cache": cache}
        if call.k is not None and call.v is not None:
            kept |= {"k": round_trip(call.k), "v": round_trip(call.v)}
        super().forward(replace(call, **kept))
