"""Recurrences over the tokens of a sequence, one token after the other, in float32.

A token's result does not depend on how steps cut the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit_lm_hybrid.mixer import Rows


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    *,
    ring: Tensor,
    rows: Rows,
) -> Tensor:
    """Linear attention with a decaying state S [dk, dv] per head: q, k [R, L, groups, dk], v [R, L,
    heads, dv], decay and beta [R, L, heads] -> q S [R, L, heads, dv].

    S becomes decay S + k v: the state space dual of Mamba-2 (Dao and Gu 2024). With `beta` it
    becomes decay S + k beta (v - k decay S): the gated delta rule (Yang et al. 2024). Heads share
    the q and k of their group. `ring` [blocks, places, heads, dk, dv].
    """
    count, length, heads = v.shape[:3]
    repeats = heads // q.shape[2]
    # [L, R * heads, ...]
    q, k = (x.repeat_interleave(repeats, 2).transpose(0, 1).flatten(1, 2) for x in (q, k))
    v = v.transpose(0, 1).flatten(1, 2)
    decay = decay.transpose(0, 1).flatten(1, 2)[..., None, None]
    learned = None if beta is None else beta.transpose(0, 1).flatten(1, 2)[..., None]
    loaded = rows.load(ring)
    state = loaded.flatten(0, 1)
    out = torch.empty_like(v)
    for token in range(length):
        state.mul_(decay[token])
        value = v[token]
        if learned is not None:
            value = (value - torch.bmm(k[token, :, None], state)[:, 0]) * learned[token]
        state.baddbmm_(k[token, :, :, None], value[:, None])
        torch.bmm(q[token, :, None], state, out=out[token, :, None])
        rows.store(ring, token, loaded)
    return out.view(length, count, heads, -1).transpose(0, 1)


def selective_scan(
    x: Tensor, decay: Tensor, into: Tensor, out_of: Tensor, *, ring: Tensor, rows: Rows
) -> Tensor:
    """Selective state space of Mamba (Gu and Dao 2023): x [R, L, channels], decay [R, L, channels,
    N], B and C [R, L, N] -> [R, L, channels].

    The state h [channels, N] becomes decay h + x B. `ring` [blocks, places, channels, N].
    """
    state = rows.load(ring)
    outputs = []
    for token in range(x.shape[1]):
        state.mul_(decay[:, token]).add_(x[:, token, :, None] * into[:, token, None])
        outputs.append(torch.bmm(state, out_of[:, token, :, None])[..., 0])
        rows.store(ring, token, state)
    return torch.stack(outputs, dim=1)
