"""Attention of one sequence in float64, as a plain loop over heads, queries and keys."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np


def naive_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    kind: str,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    bias: Callable[[int, int, int], float] | None = None,
    spans: np.ndarray | None = None,
) -> np.ndarray:
    """Output [Tq, heads, size] of q [Tq, heads, size], k and v [Tk, kv heads, size].

    kind: "decoder" (the queries are the last of the keys' positions), "encoder" (the keys are the
    first of the queries' positions, or all of them) or "cross". bias: (head, query position, key
    position) -> a number that is added to the scaled score. spans: [Tk, 2], of a decoder: [start,
    end) of the span that each position is in.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i if kind == "decoder" else i
        span = None if spans is None else tuple(spans[position])
        seen = [
            j for j in range(k.shape[0]) if sees(position, j, kind=kind, window=window, span=span)
        ]
        for head in range(q.shape[1]):
            scores = []
            for j in seen:
                score = float(q[i, head] @ k[j, head // group]) * scale
                if soft_cap is not None:
                    score = soft_cap * math.tanh(score / soft_cap)
                if bias is not None:
                    score += bias(head, position, j)
                scores.append(score)
            total = [] if sinks is None else [float(sinks[head])]
            top = max(scores + total, default=0.0)
            denominator = sum(math.exp(s - top) for s in scores + total)
            for score, j in zip(scores, seen, strict=True):
                out[i, head] += math.exp(score - top) / denominator * v[j, head // group]
    return out


def sees(
    query: int, key: int, *, kind: str, window: int | None, span: tuple[int, ...] | None = None
) -> bool:
    """Whether the token at position `query`, which is in `span`, sees the one at `key`."""
    if kind == "cross":
        return True
    if kind == "decoder" and key > query:
        return span is not None and span[0] <= key < span[1]
    return window is None or abs(query - key) < window
