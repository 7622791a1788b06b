"""Norms, rotations, gates, greedy tokens. All arithmetic is in fp32, and rounded once."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rms_norm(
    x,
    residual,
    weight,
    total,
    out,
    x_token,
    x_head,
    residual_token,
    num_heads,
    eps,
    SIZE: tl.constexpr,
    SIZE_FILLED: tl.constexpr,
    ADDS: tl.constexpr,
) -> None:
    """x [tokens, heads, SIZE] -> `out`, contiguous. ADDS: of x + residual, which goes to `total`.
    Programs (tokens * heads)."""
    row = tl.program_id(0).to(tl.int64)
    token = row // num_heads
    head = row % num_heads
    dims = tl.arange(0, SIZE_FILLED)
    is_dim = dims < SIZE
    loaded = tl.load(x + token * x_token + head * x_head + dims, mask=is_dim, other=0.0)
    if ADDS:
        # The sum is rounded, as what is stored of it, before it is normed.
        other = tl.load(residual + token * residual_token + dims, mask=is_dim, other=0.0)
        loaded = (loaded.to(tl.float32) + other.to(tl.float32)).to(loaded.dtype)
        tl.store(total + row * SIZE + dims, loaded, mask=is_dim)
    values = loaded.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
    found = scaled * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + dims, found.to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def rotate(
    x,
    cos,
    sin,
    x_token,
    x_head,
    cos_token,
    HALF: tl.constexpr,
    HALF_FILLED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
) -> None:
    """x [T, heads, size], turned in place. cos and sin [T, 2 * HALF]. Programs (T, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pairs = tl.arange(0, HALF_FILLED)
    is_pair = pairs < HALF
    at = x + token * x_token + head * x_head
    # A thread reads and writes both of a pair.
    first, second = _turned(
        at, cos + token * cos_token, sin + token * cos_token, pairs, is_pair, HALF, INTERLEAVED
    )
    to, other = _pair(pairs, HALF, INTERLEAVED)
    tl.store(at + to, first.to(x.dtype.element_ty), mask=is_pair)
    tl.store(at + other, second.to(x.dtype.element_ty), mask=is_pair)


@triton.jit
def rotate_and_store(
    q,
    k,
    v,
    cos,
    sin,
    keys,
    values,
    slots,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    cos_token,
    block,
    place,
    page_head,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIZE_FILLED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_FILLED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> None:
    """Queries are turned in place; keys are turned into the cache, and values copied, at slots [T].
    Programs (T, HEADS + KV_HEADS)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pairs = tl.arange(0, HALF_FILLED)
    is_pair = pairs < HALF
    to, other = _pair(pairs, HALF, INTERLEAVED)
    cos += token * cos_token
    sin += token * cos_token
    if head < HEADS:
        query = q + token * q_token + head * q_head
        first, second = _turned(query, cos, sin, pairs, is_pair, HALF, INTERLEAVED)
        tl.store(query + to, first.to(q.dtype.element_ty), mask=is_pair)
        tl.store(query + other, second.to(q.dtype.element_ty), mask=is_pair)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            kv_head = head - HEADS
            page = slot // BLOCK_SIZE * block + slot % BLOCK_SIZE * place + kv_head * page_head
            key = k + token * k_token + kv_head * k_head
            first, second = _turned(key, cos, sin, pairs, is_pair, HALF, INTERLEAVED)
            tl.store(keys + page + to, first.to(keys.dtype.element_ty), mask=is_pair)
            tl.store(keys + page + other, second.to(keys.dtype.element_ty), mask=is_pair)
            dims = tl.arange(0, SIZE_FILLED)
            is_dim = dims < SIZE
            tl.store(
                values + page + dims,
                tl.load(v + token * v_token + kv_head * v_head + dims, mask=is_dim),
                mask=is_dim,
            )
            if 2 * HALF < SIZE:
                # Dimensions that are not rotated.
                is_rest = is_dim & (dims >= 2 * HALF)
                tl.store(keys + page + dims, tl.load(key + dims, mask=is_rest), mask=is_rest)


@triton.jit
def _pair(pairs, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dimensions of each pair."""
    if INTERLEAVED:
        first = 2 * pairs
        second = 2 * pairs + 1
    else:
        first = pairs
        second = pairs + HALF
    return first, second


@triton.jit
def _turned(x, cos, sin, pairs, is_pair, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both of each pair, in fp32. `sin` is negative where the other one is subtracted."""
    to, other = _pair(pairs, HALF, INTERLEAVED)
    first = tl.load(x + to, mask=is_pair).to(tl.float32)
    second = tl.load(x + other, mask=is_pair).to(tl.float32)
    cos_first = tl.load(cos + to, mask=is_pair).to(tl.float32)
    cos_second = tl.load(cos + other, mask=is_pair).to(tl.float32)
    sin_first = tl.load(sin + to, mask=is_pair).to(tl.float32)
    sin_second = tl.load(sin + other, mask=is_pair).to(tl.float32)
    return first * cos_first + second * sin_first, second * cos_second + first * sin_second


@triton.jit
def gate(
    x, out, x_token, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr
) -> None:
    """[gate, up] side by side, [T, 2 * SIZE] -> activation(gate) * up [T, SIZE]. Programs (T, SIZE
    / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_dim = dims < SIZE
    value = tl.load(x + token * x_token + dims, mask=is_dim, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_token + SIZE + dims, mask=is_dim, other=0.0).to(tl.float32)
    passed = activate(value, ACTIVATION)
    tl.store(out + token * SIZE + dims, (passed * up).to(out.dtype.element_ty), mask=is_dim)


@triton.jit
def activate(value, ACTIVATION: tl.constexpr):
    """The activation of that name, in fp32."""
    if ACTIVATION == "silu":
        passed = value * _sigmoid(value)
    elif ACTIVATION == "gelu":
        passed = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # 0.5 (1 + tanh(y)) is the sigmoid of 2y.
        passed = value * _sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    else:
        tl.static_assert(ACTIVATION == "relu", "no such activation")
        passed = tl.where(value < 0.0, 0.0, value)
    return passed


@triton.jit
def _sigmoid(x):
    """Sigmoid of x, clamped at -80 so that exp(-x) does not overflow. Smaller x would give 0 up to
    rounding."""
    return tl.sigmoid(tl.maximum(x, -80.0))


@triton.jit
def likeliest(
    scores,
    places,
    best,
    found,
    row_stride,
    size,
    BLOCK: tl.constexpr,
    HAS_PLACES: tl.constexpr,
) -> None:
    """The greatest of each part of a row [R, size], a NaN where there is any, and the first place
    of it. Programs (R, size / BLOCK).

    `best` and `found` [R, size / BLOCK]. HAS_PLACES: the place of a score stands in `places`, as
    large as `scores`; else it is its index.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    indices = part * BLOCK + tl.arange(0, BLOCK)
    is_score = indices < size
    value = tl.load(scores + row * row_stride + indices, mask=is_score, other=float("-inf"))
    if HAS_PLACES:
        where = tl.load(places + row * row_stride + indices, mask=is_score, other=0)
    else:
        where = indices.to(tl.int64)
    is_nan = value != value
    greatest = tl.max(tl.where(is_nan, float("-inf"), value.to(tl.float32)), 0)
    nans = tl.sum(is_nan.to(tl.int32), 0)
    hits = tl.where(nans > 0, is_nan.to(tl.int32), (value.to(tl.float32) == greatest).to(tl.int32))
    first = tl.min(tl.where((hits > 0) & is_score, where, 9223372036854775807), 0)
    to = row * tl.num_programs(1) + part
    tl.store(best + to, tl.where(nans > 0, float("nan"), greatest).to(best.dtype.element_ty))
    tl.store(found + to, first)
