"""Recurrences over the tokens of a sequence, in float32.

A token's result does not depend on how steps cut the sequence.
"""

from __future__ import annotations

import torch
from toolkit_lm.model import Kernels
from torch import Tensor

from toolkit_lm_hybrid.mixer import Rows


def attend(
    kernels: Kernels,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    factor: Tensor,
    *,
    eps: float | None = None,
    ring: Tensor,
    rows: Rows,
    out: Tensor,
) -> None:
    """Linear attention with a decaying state per head: the state space dual of Mamba-2 (Dao and Gu
    2024), and with `eps` the gated delta rule (Yang et al. 2024), by head or by channel of k (Kimi
    Team 2025). The arguments are those of
    `Kernels.linear_attention`, which computes it where it can."""
    if kernels.linear_attention(q, k, v, decay, factor, eps, ring, rows, out):
        return
    if eps is not None:
        q = unit(q, eps) * k.shape[-1] ** -0.5
        k = unit(k, eps)
    decay, factor = decay[rows.tokens], factor[rows.tokens]
    out[rows.tokens] = one_by_one(q, k, v, decay, factor, eps is not None, ring, rows)


def scan(
    kernels: Kernels,
    x: Tensor,
    time: Tensor,
    rates: Tensor,
    into: Tensor,
    out_of: Tensor,
    *,
    ring: Tensor,
    rows: Rows,
    out: Tensor,
) -> None:
    """The selective scan of Mamba (Gu and Dao 2023). The arguments are those of
    `Kernels.selective_scan`, which computes it where it can."""
    if kernels.selective_scan(x, time, rates, into, out_of, ring, rows, out):
        return
    at = rows.tokens
    out[at] = scan_one_by_one(x[at], time[at], rates, into[at], out_of[at], ring, rows)


def scan_one_by_one(
    x: Tensor, time: Tensor, rates: Tensor, into: Tensor, out_of: Tensor, ring: Tensor, rows: Rows
) -> Tensor:
    """One token after the other: x and time [R, L, C], rates [N, C], into and out_of [R, L, N] ->
    out_of S [R, L, C]."""
    state = rows.load(ring)
    out = torch.empty_like(x)
    for token in range(x.shape[1]):
        state.mul_(torch.exp(time[:, token, None] * rates))
        state.addcmul_(into[:, token, :, None], x[:, token, None])
        torch.sum(state * out_of[:, token, :, None], 1, out=out[:, token])
        rows.store(ring, token, state)
    return out


def heads_of(x: Tensor, count: int) -> Tensor:
    """x [R, L, count * size] -> [R, L, count, size]."""
    return x.view(*x.shape[:2], count, -1)


def unit(x: Tensor, eps: float) -> Tensor:
    """x [..., N] of unit length."""
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


def one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    factor: Tensor,
    is_delta: bool,
    ring: Tensor,
    rows: Rows,
) -> Tensor:
    """One token after the other: q, k [R, L, groups, dk], v [R, L, heads, dv], factor [R, L,
    heads], decay [R, L, heads] or [R, L, heads, dk] -> q S [R, L, heads, dv]."""
    count, length, heads = v.shape[:3]
    repeats = heads // q.shape[2]
    # [L, R * heads, ...]
    q, k = (x.repeat_interleave(repeats, 2).transpose(0, 1).flatten(1, 2) for x in (q, k))
    v = v.transpose(0, 1).flatten(1, 2)
    decay = decay.transpose(0, 1).flatten(1, 2)
    decay = decay.view(*decay.shape[:2], -1, 1)
    factor = factor.transpose(0, 1).flatten(1, 2)[..., None]
    loaded = rows.load(ring)
    state = loaded.flatten(0, 1)
    out = v.new_empty(v.shape)
    for token in range(length):
        state.mul_(decay[token])
        value = v[token]
        if is_delta:
            value = value - (k[token, :, None] @ state)[:, 0]
        state.baddbmm_(k[token, :, :, None], (value * factor[token])[:, None])
        out[token] = (q[token, :, None] @ state)[:, 0]
        rows.store(ring, token, loaded)
    return out.view(length, count, heads, -1).transpose(0, 1)
