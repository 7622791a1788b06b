"""Attention of one sequence as transformers' eager implementations compute it: what half precision
may cost."""

from __future__ import annotations

import numpy as np
import torch
from toolkit_lm.attention import AttentionBias
from torch import Tensor

from toolkit_lm_devkit.naive import sees


def eager_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    bias: AttentionBias | None = None,
    spans: np.ndarray | None = None,
) -> Tensor:
    """Output [Tq, heads, size] of q [Tq, heads, size], k and v [Tk, kv heads, size]; as
    `naive_attention`, in the dtype of q.

    Scores and products are rounded to that dtype; the softmax is taken in float32.
    """
    group = q.shape[1] // k.shape[1]
    queries, keys, values = (
        x.transpose(0, 1) for x in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
    )
    q_positions = torch.arange(len(q)) + (0 if kind == "cross" else len(k) - len(q))
    k_positions = torch.arange(len(k))
    span_of_query = [None if spans is None else tuple(spans[i]) for i in q_positions.tolist()]
    visible = [
        sees(i, k_positions.numpy(), kind=kind, window=window, span=span)
        for i, span in zip(q_positions.tolist(), span_of_query, strict=True)
    ]
    scores = queries @ keys.transpose(1, 2) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if bias is not None:
        scores = scores + bias(q_positions, k_positions).to(q.dtype)
    scores = scores.masked_fill(~torch.from_numpy(np.stack(visible)), float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)[..., : len(k)]
    return (weights @ values).transpose(0, 1)
