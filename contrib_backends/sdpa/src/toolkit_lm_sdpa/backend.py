"""SdpaBackend: paged attention in plain torch."""

from __future__ import annotations

import torch
from toolkit_lm.attention import (
    AttentionCall,
    AttentionSpec,
    BatchView,
    GroupSetup,
    common_refusal,
)
from toolkit_lm.kv import FullSpec
from toolkit_lm_paged_attention import PagedBackend, PagedStep, fused_attention
from torch import Tensor

from toolkit_lm_sdpa import quantized
from toolkit_lm_sdpa.equal_length import attend_equal_length
from toolkit_lm_sdpa.formula import probabilities, scores
from toolkit_lm_sdpa.plan import Bucket, LayerKey, Row, make_plan
from toolkit_lm_sdpa.quantized import CACHES

_DTYPES = ("float32", "bfloat16", "float16")
_CHUNK_SCORES = 2**22
"""Most scores of one row that are held at a time by the explicit formula."""


class SdpaBackend(PagedBackend):
    """Exact attention on any device.

    Decode rows of similar length are padded and computed together. Encoder sequences of equal
    length are computed together. Other rows run one by one, with torch's
    scaled_dot_product_attention if it can compute them.

    In an encoder, a window hides keys at a distance of `window` or more on both sides.

    Of a quantized cache, the blocks that a step reads are made floats in each layer.
    """

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        spec = setup.kv_cache
        self.is_quantized = isinstance(spec, FullSpec) and (spec.dtype, spec.scales) in CACHES

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        return common_refusal(spec, _DTYPES, CACHES)

    def build(self, batch: BatchView) -> PagedStep:
        return quantized.build(batch) if self.is_quantized else PagedStep(batch, self.store(batch))

    def write_kv(self, call: AttentionCall) -> None:
        if self.is_quantized:
            quantized.write_kv(call)
        else:
            super().write_kv(call)

    def forward(self, call: AttentionCall) -> None:
        layer = call.layer
        step: PagedStep = call.metadata
        if self.is_quantized:
            call = quantized.dequantized(call)
        plan = step.plan(LayerKey.of(layer, call.kv_cache), make_plan)
        cache = None if call.kv_cache is None else _heads(call.kv_cache[0])
        for tokens in plan.keyless:
            call.out[tokens].zero_()
        for bucket in plan.buckets:
            assert cache is not None
            _decode(call, cache, bucket)
        for rows in plan.equal_length:
            attend_equal_length(call, rows)
        for row in plan.rows:
            if row.index is None:
                assert call.k is not None and call.v is not None
                own = slice(row.tokens.start, row.tokens.start + len(row.k_positions))
                keys = call.k[own].transpose(0, 1)
                values = call.v[own].transpose(0, 1)
            else:
                assert cache is not None
                keys, values = (_gather(half, row.index) for half in cache)
            if layer.soft_cap is None and layer.sinks is None and layer.bias is None:
                _attend_fast(call, keys, values, row)
            else:
                _attend_explicit(call, keys, values, row)


def _heads(cache: Tensor) -> tuple[Tensor, Tensor]:
    """The cache as heads [N, head_size], from the first key's on and from the first value's on: one
    index finds a head of a key and that of its value."""
    _, _, block_size, num_kv_heads, size = cache.shape
    heads = cache.view(-1, size)
    return heads, heads[block_size * num_kv_heads :]


def _gather(half: Tensor, index: Tensor) -> Tensor:
    """Keys (or values) [*index.shape, head_size] out of their half of the cache."""
    return half.index_select(0, index.view(-1)).view(*index.shape, half.shape[-1])


def _decode(call: AttentionCall, cache: tuple[Tensor, Tensor], bucket: Bucket) -> None:
    """Computes the rows of a bucket; `cache` is that of `_heads`.

    Query heads that share a KV head are the rows of one small matrix product: it reads keys once
    for all of them.
    """
    layer = call.layer
    q = call.q
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
    raw = scores(queries, _gather(cache[0], bucket.index)).view(num_rows, kv_heads, group, -1)
    sinks = None if layer.sinks is None else layer.sinks.view(kv_heads, group, 1)
    weights = probabilities(raw, layer.scale, layer.soft_cap, bias, bucket.mask, sinks)
    weights = weights.to(q.dtype).flatten(0, 1)
    result = torch.bmm(weights, _gather(cache[1], bucket.index)).view(
        num_rows, layer.num_heads, layer.head_size
    )
    if bucket.tokens is None:
        call.out.copy_(result)
    else:
        call.out.index_copy_(0, bucket.tokens, result)


def _attend_fast(call: AttentionCall, keys: Tensor, values: Tensor, row: Row) -> None:
    """Computes one row with torch's kernels; keys and values [num_kv_heads, Tk, head_size]."""
    layer = call.layer
    heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    queries = call.q[row.tokens].view(-1, *heads, layer.head_size).permute(1, 2, 0, 3)
    # A KV head is a batch entry, so that its query heads share the keys without a copy of them.
    keys, values = (
        keys[:, None].expand(-1, heads[1], -1, -1),
        values[:, None].expand(-1, heads[1], -1, -1),
    )
    result = fused_attention(
        queries, keys, values, scale=layer.scale, mask=row.visible, causal=row.causal
    )
    call.out[row.tokens].view(-1, *heads, layer.head_size).copy_(result.permute(2, 0, 1, 3))


def _attend_explicit(call: AttentionCall, keys: Tensor, values: Tensor, row: Row) -> None:
    """Computes one row by the formula, some queries at a time; keys and values [num_kv_heads, Tk,
    head_size]."""
    layer = call.layer
    heads = (layer.num_kv_heads, layer.num_heads // layer.num_kv_heads)
    sinks = None if layer.sinks is None else layer.sinks.view(*heads, 1, 1)
    start = row.tokens.start
    stop = row.tokens.stop
    step = max(1, _CHUNK_SCORES // (layer.num_heads * keys.shape[1]))
    for first in range(start, stop, step):
        tokens = slice(first, min(first + step, stop))
        part = slice(tokens.start - start, tokens.stop - start)
        queries = call.q[tokens].view(-1, *heads, layer.head_size).permute(1, 2, 0, 3)
        raw = scores(queries.flatten(1, 2), keys).view(*heads, -1, keys.shape[1])
        bias = (
            None
            if layer.bias is None
            else layer.bias(row.q_positions[part], row.k_positions).view(*heads, -1, keys.shape[1])
        )
        mask = None
        if row.visible is not None:
            mask = torch.zeros(row.visible[part].shape, device=call.q.device).masked_fill_(
                ~row.visible[part], float("-inf")
            )
        weights = probabilities(raw, layer.scale, layer.soft_cap, bias, mask, sinks)
        if row.visible is not None:
            # All weights of a query that sees no key are NaN: its output is 0.
            weights.masked_fill_(~row.visible[part], 0.0)
        result = torch.bmm(weights.to(values.dtype).flatten(1, 2), values).view(
            *heads, -1, layer.head_size
        )
        call.out[tokens].view(-1, *heads, layer.head_size).copy_(result.permute(2, 0, 1, 3))
