"""Attention of one sequence in float64 by its formula, one query after another."""

from __future__ import annotations

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
    first of the queries' positions, or all of them) or "cross".
    bias: (head, query position, key position) -> a number that is added to the scaled score.
    spans: [Tk, 2], of a decoder: [start, end) of the span that each position is in.
    """
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    num_heads = q.shape[1]
    num_kv_heads = k.shape[1]
    by_group = (num_kv_heads, num_heads // num_kv_heads, -1)
    keys = np.arange(k.shape[0])
    for i in range(q.shape[0]):
        position = k.shape[0] - q.shape[0] + i if kind == "decoder" else i
        span = None if spans is None else tuple(spans[position])
        seen = keys[sees(position, keys, kind=kind, window=window, span=span)]
        scores = np.einsum("hgd,khd->hgk", q[i].reshape(by_group), k[seen]) * scale
        scores = scores.reshape(num_heads, -1)
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        if bias is not None:
            scores += [[bias(head, position, int(j)) for j in seen] for head in range(num_heads)]
        with_sink = scores if sinks is None else np.column_stack([scores, sinks])
        if not with_sink.size:
            continue
        top = with_sink.max(axis=1, keepdims=True)
        weights = np.exp(scores - top) / np.exp(with_sink - top).sum(axis=1, keepdims=True)
        mixed = np.einsum("hgk,khd->hgd", weights.reshape(by_group), v[seen])
        out[i] = mixed.reshape(num_heads, -1)
    return out


def sees(
    query: int,
    key: int | np.ndarray,
    *,
    kind: str,
    window: int | None,
    span: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Whether the token at position `query`, which is in `span`, sees those at `key`."""
    near = np.ones_like(key, dtype=bool)
    if kind == "cross":
        return near
    if window is not None:
        near = np.less(np.abs(np.subtract(query, key)), window)
    if kind == "encoder":
        return near
    of_span = False if span is None else np.greater_equal(key, span[0]) & np.less(key, span[1])
    return np.where(np.greater(key, query), of_span, near)
