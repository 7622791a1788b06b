"""Sequences of equal length whose tokens all see each other: encoders. They are computed together,
and without padding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from toolkit_lm.attention import AttentionCall
from toolkit_lm_paged_attention import fused_attention
from torch import Tensor

from toolkit_lm_sdpa.plan import EqualLengthRows

_SHORT = 128
"""Up to so many tokens, two matrix products with a softmax between are faster on a CPU than torch's
kernel, which works in tiles."""
_CHUNK_SCORES = 2**20
"""Most scores that these hold at a time: more do not stay in the caches, and fewer leave the
threads little to share."""


def attend_equal_length(call: AttentionCall, rows: EqualLengthRows) -> None:
    """Writes attention of the tokens of `rows` to `call.out`. Keys and values are `call.k` and
    `call.v`."""
    assert call.k is not None and call.v is not None
    layer = call.layer
    out = call.out
    length = len(rows.positions)
    heads = layer.num_heads
    kv_heads = layer.num_kv_heads
    size = layer.head_size
    bias = None if layer.bias is None else layer.bias(rows.positions, rows.positions).float()
    fast = out.device.type == "cpu" and length <= _SHORT
    most = max(1, _CHUNK_SCORES // (heads * length * length)) if fast else len(out)
    for tokens, count in _parts(rows, most):
        # A KV head's query heads lie side by side: [count, kv_heads, group, length, size].
        queries = (
            _gather(call.q, tokens).view(count, length, kv_heads, -1, size).permute(0, 2, 3, 1, 4)
        )
        keys, values = (
            _gather(x, tokens).view(count, length, kv_heads, size).transpose(1, 2)
            for x in (call.k, call.v)
        )
        if fast and count > 1:
            result = _products(queries, keys, values, layer.scale, bias)
        else:
            # Four axes: with five, torch takes its slowest kernel.
            keys, values = (
                x.unsqueeze(2).expand(queries.shape).flatten(1, 2) for x in (keys, values)
            )
            result = fused_attention(
                queries.flatten(1, 2), keys, values, scale=layer.scale, mask=bias
            )
        result = result.transpose(1, 2)
        if isinstance(tokens, slice):
            out[tokens].view(result.shape).copy_(result)
        else:
            out.index_copy_(0, tokens, result.flatten(0, 1))


def _gather(x: Tensor, tokens: slice | Tensor) -> Tensor:
    return x[tokens] if isinstance(tokens, slice) else x.index_select(0, tokens)


def _parts(rows: EqualLengthRows, most: int) -> Iterator[tuple[slice | Tensor, int]]:
    """Tokens of at most `most` of the sequences, and how many these are: about as many in each
    part."""
    length = len(rows.positions)
    tokens = rows.tokens
    start, total = (
        (tokens.start, tokens.stop - tokens.start)
        if isinstance(tokens, slice)
        else (0, len(tokens))
    )
    total //= length
    parts = -(-total // most)
    for i in range(parts):
        first = total * i // parts
        end = total * (i + 1) // parts
        part = slice(start + first * length, start + end * length)
        yield (part if isinstance(tokens, slice) else tokens[part]), end - first


def _products(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None
) -> Tensor:
    """Attention [N, heads, L, size] of queries [N, kv_heads, group, L, size] over keys and values
    [N, kv_heads, L, size]."""
    # Scores and softmax are in fp32: what rounds them to bf16 is five times as far from the truth
    # as torch's kernel.
    count, kv_heads, group, length, size = queries.shape
    batch = count * kv_heads
    q, k = (
        x.to(torch.float32, memory_format=torch.contiguous_format).reshape(batch, -1, size)
        for x in (queries, keys)
    )
    v = values.reshape(batch, length, size)
    if bias is None:
        base = q.new_empty((1, 1, 1)).expand(batch, group * length, length)
        beta = 0
    else:
        base = (
            bias.reshape(1, kv_heads, -1, length)
            .expand(count, -1, -1, -1)
            .reshape(batch, -1, length)
        )
        beta = 1
    weights = torch.baddbmm(base, q, k.transpose(1, 2), beta=beta, alpha=scale).softmax(-1)
    return torch.bmm(weights.to(v.dtype), v).view(count, kv_heads * group, length, size)
