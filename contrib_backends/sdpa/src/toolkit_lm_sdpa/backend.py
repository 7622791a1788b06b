"""SdpaBackend: paged attention in plain torch."""

from __future__ import annotations

import torch
from toolkit_lm.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchView,
    LayerParams,
    common_refusal,
)
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
from torch import Tensor

from toolkit_lm_sdpa.equal_length import attend_equal_length
from toolkit_lm_sdpa.formula import probabilities, scores
from toolkit_lm_sdpa.kernel import fused_attention
from toolkit_lm_sdpa.plan import Bucket, Metadata, Row

_DTYPES = ("float32", "bfloat16", "float16")
_CHUNK_SCORES = 2**22
"""Most scores of one row that are held at a time, when they are computed step by step."""


class SdpaBackend(AttentionBackend):
    """Exact attention on any device. A page holds (2, block_size, num_kv_heads, head_size): keys
    before values.

    Decode rows of similar length are computed together, padded; sequences of an encoder together
    where they are of equal length; other rows one by one, with torch's scaled_dot_product_attention
    where it can. In an encoder, a window hides keys at a distance of `window` or more on both
    sides.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        return common_refusal(spec, _DTYPES)

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, FullSpec)
        return [PageTensor((2, spec.block_size, spec.num_kv_heads, spec.head_size), spec.dtype)]

    def build(self, batch: BatchView) -> Metadata:
        slots = batch.slot_mapping
        stored = slots.ge(0).nonzero()[:, 0] if batch.has_padding and slots is not None else None
        return Metadata(batch, stored)

    def write_kv(
        self, layer: LayerParams, k: Tensor, v: Tensor, kv_cache: tuple[Tensor, ...], meta: Metadata
    ) -> None:
        keys, values = halves(kv_cache, layer.head_size * layer.num_kv_heads)
        slots, k, v = meta.slots(kv_cache[0].shape[2]), k.flatten(1), v.flatten(1)
        if meta.stored is not None:
            k, v = k[meta.stored], v[meta.stored]
        keys.index_copy_(0, slots, k)
        values.index_copy_(0, slots, v)

    def forward(
        self,
        layer: LayerParams,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: tuple[Tensor, ...] | None,
        meta: Metadata,
        out: Tensor,
    ) -> None:
        plan = meta.plan(layer, kv_cache)
        cache = None if kv_cache is None else halves(kv_cache, layer.head_size)
        for tokens in plan.keyless:
            out[tokens].zero_()
        for bucket in plan.buckets:
            assert cache is not None
            _decode(layer, q, cache, bucket, out)
        for rows in plan.equal_length:
            assert k is not None and v is not None
            attend_equal_length(layer, q, k, v, rows, out)
        for row in plan.rows:
            if row.index is None:
                assert k is not None and v is not None
                own = slice(row.tokens.start, row.tokens.start + len(row.k_positions))
                keys = k[own].transpose(0, 1)
                values = v[own].transpose(0, 1)
            else:
                assert cache is not None
                keys, values = (_gather(half, row.index) for half in cache)
            if layer.soft_cap is None and layer.sinks is None and layer.bias is None:
                _attend_fast(layer, q, keys, values, row, out)
            else:
                _attend_explicit(layer, q, keys, values, row, out)


def halves(kv_cache: tuple[Tensor, ...], size: int) -> tuple[Tensor, Tensor]:
    """The cache as vectors [N, size], from the first key on and from the first value on: one index
    finds a key and its value."""
    vectors = kv_cache[0].view(-1, size)
    return vectors, vectors[kv_cache[0][0, 0].numel() // size :]


def _gather(half: Tensor, index: Tensor) -> Tensor:
    """Keys (or values) [*index.shape, head_size] out of their half of the cache."""
    return half.index_select(0, index.view(-1)).view(*index.shape, half.shape[-1])


def _decode(
    layer: LayerParams, q: Tensor, kv_cache: tuple[Tensor, Tensor], bucket: Bucket, out: Tensor
) -> None:
    """The query heads that share a KV head are the rows of one small matrix product, so keys are
    read once for all of them."""
    num_rows = len(bucket.mask)
    kv_heads = layer.num_kv_heads
    group = layer.num_heads // layer.num_kv_heads
    queries = q if bucket.tokens is None else q[bucket.tokens]
    bias = None
    if layer.bias is not None:
        assert bucket.k_positions is not None
        bias = (
            layer.bias(bucket.q_positions, bucket.k_positions)
            .reshape(kv_heads, group, num_rows, -1)
            .permute(2, 0, 1, 3)
        )
    queries = queries.reshape(num_rows * kv_heads, group, layer.head_size)
    raw = scores(queries, _gather(kv_cache[0], bucket.index)).view(num_rows, kv_heads, group, -1)
    sinks = None if layer.sinks is None else layer.sinks.view(kv_heads, group, 1)
    weights = probabilities(raw, layer.scale, layer.soft_cap, bias, bucket.mask, sinks)
    weights = weights.to(q.dtype).flatten(0, 1)
    result = torch.bmm(weights, _gather(kv_cache[1], bucket.index)).view(
        num_rows, layer.num_heads, layer.head_size
    )
    if bucket.tokens is None:
        out.copy_(result)
    else:
        out.index_copy_(0, bucket.tokens, result)


def _attend_fast(
    layer: LayerParams, q: Tensor, keys: Tensor, values: Tensor, row: Row, out: Tensor
) -> None:
    """One row with torch's kernels; keys and values [num_kv_heads, Tk, head_size]."""
    heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    queries = q[row.tokens].view(-1, *heads, layer.head_size).permute(1, 2, 0, 3)
    # A KV head is a batch entry, so that its query heads share the keys without a copy of them.
    keys, values = (
        keys[:, None].expand(-1, heads[1], -1, -1),
        values[:, None].expand(-1, heads[1], -1, -1),
    )
    result = fused_attention(
        queries, keys, values, scale=layer.scale, mask=row.visible, causal=row.causal
    )
    out[row.tokens].view(-1, *heads, layer.head_size).copy_(result.permute(2, 0, 1, 3))


def _attend_explicit(
    layer: LayerParams, q: Tensor, keys: Tensor, values: Tensor, row: Row, out: Tensor
) -> None:
    """One row by the formula, some queries at a time; keys and values [num_kv_heads, Tk,
    head_size]."""
    heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    sinks = None if layer.sinks is None else layer.sinks.view(*heads, 1, 1)
    start = row.tokens.start
    stop = row.tokens.stop
    step = max(1, _CHUNK_SCORES // (layer.num_heads * keys.shape[1]))
    for first in range(start, stop, step):
        tokens = slice(first, min(first + step, stop))
        part = slice(tokens.start - start, tokens.stop - start)
        queries = q[tokens].view(-1, *heads, layer.head_size).permute(1, 2, 0, 3)
        raw = scores(queries.flatten(1, 2), keys).view(*heads, -1, keys.shape[1])
        bias = (
            None
            if layer.bias is None
            else layer.bias(row.q_positions[part], row.k_positions).view(*heads, -1, keys.shape[1])
        )
        mask = None
        if row.visible is not None:
            mask = torch.zeros(row.visible[part].shape, device=q.device).masked_fill_(
                ~row.visible[part], float("-inf")
            )
        weights = probabilities(raw, layer.scale, layer.soft_cap, bias, mask, sinks)
        if row.visible is not None:
            # Of a query that sees no key, all of them are NaN: its output is 0.
            weights.masked_fill_(~row.visible[part], 0.0)
        result = torch.bmm(weights.to(values.dtype).flatten(1, 2), values).view(
            *heads, -1, layer.head_size
        )
        out[tokens].view(-1, *heads, layer.head_size).copy_(result.permute(2, 0, 1, 3))
