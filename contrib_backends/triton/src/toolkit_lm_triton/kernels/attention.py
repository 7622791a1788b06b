"""Attention in tiles with a running softmax (Dao 2023, FlashAttention-2), its split along keys
(Flash-Decoding), and the cache's stores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attend(
    q,
    k,
    v,
    out,
    pieces,
    block_table,
    sinks,
    bias,
    span_ends,
    partial,
    stats,
    scales,
    k_scale,
    v_scale,
    q_token,
    q_head,
    k_block,
    k_token,
    k_head,
    v_block,
    v_token,
    v_head,
    scales_block,
    scales_token,
    out_token,
    out_head,
    table_row,
    bias_head,
    bias_query,
    bias_origin,
    scale,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_FILLED: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_FILLED: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    CAUSAL: tl.constexpr,
    SPANS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Attention of a piece, for one KV head with its query heads, over one share of the keys.
    Programs (pieces, kv_heads, splits).

    q and out are [T, heads, SIZE]. k and v are paged if BLOCK_SIZE is not 0, else [T, kv_heads,
    SIZE]. Those of a quantized cache are codes: times their scales, in pages [2, BLOCK_SIZE,
    kv_heads], or times k_scale and v_scale of the layer.

    SPLIT 0: the keys are not shared out, and `out` is written. Otherwise all results are in fp32:
    sums [pieces, splits, kv_heads, rows, SIZE_FILLED] in `partial`, maxima and denominators
    [pieces, splits, kv_heads, rows, 2] in `stats`.

    BIAS 1: by offset, [heads, 2 * bias_origin + 1]. BIAS 2: by pair, [heads, queries, keys]. Its
    first query is number `bias_origin` of the launch.
    """
    ROWS: tl.constexpr = GROUP_FILLED * QUERIES
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    piece = pieces + index * COLUMNS
    row = tl.load(piece)
    token = tl.load(piece + 1)
    position = tl.load(piece + 2)
    count = tl.load(piece + 3)
    begin = tl.load(piece + 4)
    end = tl.load(piece + 5)
    origin = tl.load(piece + 6)
    place = tl.load(piece + 7)
    if SPLIT:
        begin += split * SPLIT
        end = tl.minimum(end, begin + SPLIT)

    rows = tl.arange(0, ROWS)
    query = rows // GROUP_FILLED
    member = rows % GROUP_FILLED
    head = kv_head * GROUP + member
    is_real = (query < count) & (member < GROUP)
    dims = tl.arange(0, SIZE_FILLED)
    is_dim = dims < SIZE
    tokens = (token + query).to(tl.int64)
    real_dims = is_real[:, None] & is_dim[None, :]
    queries = tl.load(
        q + tokens[:, None] * q_token + head[:, None] * q_head + dims[None, :],
        mask=real_dims,
        other=0.0,
    )
    positions = position + query
    if SPANS:
        span_end = tl.load(span_ends + tokens, mask=is_real, other=0)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        # A sink is a key without a value. One share of the keys has it.
        logits = tl.load(sinks + head, mask=is_real, other=0.0).to(tl.float32)
        top = tl.where(split == 0, logits, top)
        total = tl.where(split == 0, 1.0, total)
    sums = tl.zeros((ROWS, SIZE_FILLED), tl.float32)

    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < end
        if BLOCK_SIZE:
            block = tl.load(
                block_table + row.to(tl.int64) * table_row + keys // BLOCK_SIZE,
                mask=is_key,
                other=0,
            ).to(tl.int64)
            k_places = block * k_block + (keys % BLOCK_SIZE) * k_token
            v_places = block * v_block + (keys % BLOCK_SIZE) * v_token
        else:
            k_places = (origin + keys).to(tl.int64) * k_token
            v_places = (origin + keys).to(tl.int64) * v_token
        # Keys that no query of the chunk sees may be NaN, and are never read.
        key = tl.load(
            k + k_places[None, :] + kv_head * k_head + dims[:, None],
            mask=is_key[None, :] & is_dim[:, None],
            other=0.0,
        )
        # Codes are exact in 16 bits.
        scores = tl.dot(queries, key.to(queries.dtype), input_precision="ieee") * scale
        if scales is not None:
            places = block * scales_block + (keys % BLOCK_SIZE) * scales_token + kv_head
            key_scale = tl.load(scales + places, mask=is_key, other=0.0)
            places += scales_token * BLOCK_SIZE
            value_scale = tl.load(scales + places, mask=is_key, other=0.0)
            scores *= key_scale[None, :]
        elif k_scale is not None:
            scores *= tl.load(k_scale)
        if SOFT_CAP > 0.0:
            # tanh(x) = (1 - exp(-2x)) / (1 + exp(-2x)), of |x|: nothing overflows.
            shrunk = tl.exp(tl.abs(scores) * (-2.0 / SOFT_CAP))
            capped = SOFT_CAP * (1.0 - shrunk) / (1.0 + shrunk)
            scores = tl.where(scores < 0.0, -capped, capped)
        ahead = keys[None, :] - positions[:, None]
        seen = is_real[:, None] & is_key[None, :]
        if BIAS == 1:
            scores += tl.load(
                bias + head[:, None] * bias_head + (ahead + bias_origin), mask=seen, other=0.0
            )
        if BIAS == 2:
            pairs = (place - bias_origin + query).to(tl.int64)[:, None] * bias_query + keys[None, :]
            scores += tl.load(
                bias + head.to(tl.int64)[:, None] * bias_head + pairs, mask=seen, other=0.0
            )
        if CAUSAL:
            if SPANS:
                seen = seen & ((ahead <= 0) | (keys[None, :] < span_end[:, None]))
            else:
                seen = seen & (ahead <= 0)
        elif WINDOW:
            seen = seen & (ahead < WINDOW)
        if WINDOW:
            seen = seen & (ahead > -WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # The exponents of a query that has seen no key yet are -inf and not NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - base[:, None])
        kept = tl.exp(top - base)
        total = total * kept + tl.sum(weights, 1)
        value = tl.load(
            v + v_places[:, None] + kv_head * v_head + dims[None, :],
            mask=is_key[:, None] & is_dim[None, :],
            other=0.0,
        )
        if scales is not None:
            weights *= value_scale[None, :]
        sums = sums * kept[:, None] + tl.dot(
            weights.to(queries.dtype), value.to(queries.dtype), input_precision="ieee"
        )
        top = higher

    if v_scale is not None:
        sums *= tl.load(v_scale)

    if SPLIT:
        share = (
            (index.to(tl.int64) * tl.num_programs(2) + split) * tl.num_programs(1) + kv_head
        ) * ROWS + rows
        # A share without keys is not read.
        is_used = is_real & (rows < tl.where((split == 0) | (begin < end), ROWS, 0))
        tl.store(
            partial + share[:, None] * SIZE_FILLED + dims[None, :],
            sums,
            mask=is_used[:, None] & is_dim[None, :],
        )
        tl.store(stats + share * 2, top, mask=is_used)
        tl.store(stats + share * 2 + 1, total, mask=is_used)
    else:
        found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
        places = tokens[:, None] * out_token + head[:, None] * out_head + dims[None, :]
        tl.store(out + places, found.to(out.dtype.element_ty), mask=real_dims)


@triton.jit
def merge(
    partial,
    stats,
    out,
    pieces,
    out_token,
    out_head,
    num_splits,
    num_kv_heads,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_FILLED: tl.constexpr,
    QUERIES: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_FILLED: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Merges the shares of `attend`, in order. Programs (pieces, kv_heads)."""
    ROWS: tl.constexpr = GROUP_FILLED * QUERIES
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    piece = pieces + index * COLUMNS
    token = tl.load(piece + 1)
    count = tl.load(piece + 3)
    begin = tl.load(piece + 4)
    end = tl.load(piece + 5)
    rows = tl.arange(0, ROWS)
    query = rows // GROUP_FILLED
    member = rows % GROUP_FILLED
    is_real = (query < count) & (member < GROUP)
    dims = tl.arange(0, SIZE_FILLED)
    real_dims = is_real[:, None] & (dims < SIZE)[None, :]
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, SIZE_FILLED), tl.float32)
    for split in range(tl.maximum(tl.cdiv(end - begin, SPLIT), 1)):
        share = ((index.to(tl.int64) * num_splits + split) * num_kv_heads + kv_head) * ROWS + rows
        other = tl.load(stats + share * 2, mask=is_real, other=float("-inf"))
        higher = tl.maximum(top, other)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        kept = tl.exp(top - base)
        added = tl.exp(other - base)
        total = total * kept + added * tl.load(stats + share * 2 + 1, mask=is_real, other=0.0)
        shared = tl.load(
            partial + share[:, None] * SIZE_FILLED + dims[None, :], mask=real_dims, other=0.0
        )
        sums = sums * kept[:, None] + added[:, None] * shared
        top = higher
    found = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    head = kv_head * GROUP + member
    places = (
        (token + query).to(tl.int64)[:, None] * out_token + head[:, None] * out_head + dims[None, :]
    )
    tl.store(out + places, found.to(out.dtype.element_ty), mask=real_dims)


@triton.jit
def store_kv(
    k,
    v,
    keys,
    values,
    slots,
    scales,
    k_scale,
    v_scale,
    k_token,
    k_head,
    v_token,
    v_head,
    block,
    token,
    head,
    scales_block,
    scales_token,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_FILLED: tl.constexpr,
    GREATEST: tl.constexpr,
) -> None:
    """Stores k and v [S, kv_heads, SIZE] in pages, at slots [S]. Slots of -1 are skipped. Programs
    (S, kv_heads).

    GREATEST: the greatest code of a quantized cache. Codes are k / k_scale, or have scales of their
    own in pages [2, BLOCK_SIZE, kv_heads].
    """
    index = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + index)
    dims = tl.arange(0, SIZE_FILLED)
    stored = dims < tl.where(slot >= 0, SIZE, 0)
    to = slot // BLOCK_SIZE * block + slot % BLOCK_SIZE * token + kv_head * head + dims
    key = tl.load(k + index * k_token + kv_head * k_head + dims, mask=stored, other=0.0)
    value = tl.load(v + index * v_token + kv_head * v_head + dims, mask=stored, other=0.0)
    if GREATEST:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        if scales is not None:
            key_scale = _scale(key, GREATEST)
            value_scale = _scale(value, GREATEST)
            at = slot // BLOCK_SIZE * scales_block + slot % BLOCK_SIZE * scales_token + kv_head
            tl.store(scales + at, key_scale, mask=slot >= 0)
            tl.store(scales + at + scales_token * BLOCK_SIZE, value_scale, mask=slot >= 0)
        else:
            key_scale = tl.load(k_scale)
            value_scale = tl.load(v_scale)
        key = _codes(key, key_scale, GREATEST)
        value = _codes(value, value_scale, GREATEST)
    tl.store(keys + to, key.to(keys.dtype.element_ty), mask=stored)
    tl.store(values + to, value.to(values.dtype.element_ty), mask=stored)


@triton.jit
def _scale(x, GREATEST: tl.constexpr):
    """The scale by which the greatest |x| has the greatest code; 1 for zeros. NaN if any x is."""
    largest = tl.max(tl.abs(x), 0)
    scale = tl.where(largest == 0.0, 1.0, tl.div_rn(largest, GREATEST))
    return tl.where(tl.sum((x != x).to(tl.int32), 0) > 0, float("nan"), scale)


@triton.jit
def _codes(x, scale, GREATEST: tl.constexpr):
    """Codes of x as floats: whole numbers for int8, and numbers of float8_e4m3fn."""
    # NaN stays NaN.
    least = tl.maximum(tl.div_rn(x, scale), -GREATEST, propagate_nan=tl.PropagateNan.ALL)
    codes = tl.minimum(least, GREATEST, propagate_nan=tl.PropagateNan.ALL)
    # 1.5 * 2^23 steps, which are added, leave the nearest number of steps, even among equals.
    if GREATEST == 127:
        steps = 12582912.0
    else:
        # 8 steps for each power of 2, and at least 2^-9. The conversion has nothing left to round,
        # which the interpreter's gets wrong.
        exponent = tl.maximum(((codes.to(tl.int32, bitcast=True) >> 23) & 255) - 3, 118)
        steps = (exponent << 23).to(tl.float32, bitcast=True) * 12582912.0
    return (codes + steps) - steps
