"""Filters of the distribution: top-k, top-p, min-p, typical, each on what the one before has left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.sampling.batch import SamplingBatch


def distribution(logits: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] float32 -> [R, V] the probabilities that tokens are drawn with, after temperature and filters."""
    # Shifting by the maximum first keeps tiny temperatures finite.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / _column(rows.temperature, logits)
    filtered = np.flatnonzero(rows.filtered)
    if len(filtered) == len(rows):
        return _filter(logits, rows)
    probs = torch.softmax(logits, dim=-1)
    if len(filtered):
        index = torch.from_numpy(filtered).to(logits.device)
        probs[index] = _filter(logits[index], rows.select(filtered))
    return probs


def _filter(logits: Tensor, rows: SamplingBatch) -> Tensor:
    probs = torch.softmax(logits, dim=-1)
    sorting = np.flatnonzero((rows.top_k > 0) | (rows.top_p < 1))
    if len(sorting):
        index = torch.from_numpy(sorting).to(logits.device)
        probs[index] = _top(logits[index], rows.select(sorting))
    filters: list[tuple[np.ndarray, Callable[[Tensor, SamplingBatch], Tensor]]] = [(rows.min_p > 0, _min_p), (rows.typical_p < 1, _typical)]
    for uses, keeps in filters:
        users = np.flatnonzero(uses)
        if len(users):
            index = torch.from_numpy(users).to(probs.device)
            some = probs[index]
            some = some.masked_fill(~keeps(some, rows.select(users)), 0.0)
            probs[index] = some / some.sum(dim=-1, keepdim=True)
    return probs


def _top(logits: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] -> [R, V] probabilities after top-k and top-p, which keep the first of the tokens sorted by likelihood."""
    # Sorting the logits and not the probabilities keeps the order of tokens whose probabilities round to the same.
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocab_size)).to(logits.device)[:, None]
    probs = torch.softmax(logits.masked_fill(torch.arange(vocab_size, device=logits.device) >= top_k, -torch.inf), dim=-1)
    top_p = _column(rows.top_p, probs)
    # 1.0 keeps all: rounding must not cut the tail off.
    dropped = (probs.cumsum(dim=-1, dtype=torch.float64) - probs >= top_p) & (top_p < 1)
    dropped[:, 0] = False
    probs = probs.masked_fill(dropped, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, probs / probs.sum(dim=-1, keepdim=True))


# Each takes probabilities [R, V], and says which tokens are kept. Dropped ones are 0.


def _min_p(probs: Tensor, rows: SamplingBatch) -> Tensor:
    return probs >= _column(rows.min_p, probs) * probs.amax(dim=-1, keepdim=True)


def _typical(probs: Tensor, rows: SamplingBatch) -> Tensor:
    surprise = -probs.log()
    entropy = (probs * surprise).nan_to_num(0.0).sum(dim=-1, keepdim=True)
    distance = (surprise - entropy).abs()
    nearest, order = distance.sort(dim=-1, stable=True)
    total = probs.gather(-1, order).cumsum(dim=-1, dtype=torch.float64)
    last = (total < _column(rows.typical_p, total)).sum(dim=-1, keepdim=True).clamp_(max=probs.shape[-1] - 1)
    return (distance <= nearest.gather(-1, last)) & (probs > 0)


def _column(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like)[:, None]
