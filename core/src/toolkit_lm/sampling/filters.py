"""Filters of the distribution: top-k, top-p, min-p, each on what the one before has left."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.sampling.batch import SamplingBatch


def distribution(logits: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] float32 -> [R, V] the probabilities that tokens are drawn with, after temperature and filters."""
    # Shifting by the maximum first keeps tiny temperatures finite.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / column(rows.temperature, logits)
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
    users = np.flatnonzero(rows.min_p > 0)
    if len(users):
        index = torch.from_numpy(users).to(probs.device)
        probs[index] = _min_p(probs[index], rows.select(users))
    return probs


def _top(logits: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] -> [R, V] probabilities after top-k and top-p, which keep the first of the tokens sorted by likelihood."""
    # Sorting the logits and not the probabilities keeps the order of tokens whose probabilities round to the same.
    logits, order = logits.sort(dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = torch.from_numpy(np.where(rows.top_k > 0, rows.top_k, vocab_size)).to(logits.device)[:, None]
    probs = torch.softmax(logits.masked_fill(torch.arange(vocab_size, device=logits.device) >= top_k, -torch.inf), dim=-1)
    top_p = column(rows.top_p, probs)
    # 1.0 keeps all: rounding must not cut the tail off.
    dropped = (probs.cumsum(dim=-1, dtype=torch.float64) - probs >= top_p) & (top_p < 1)
    dropped[:, 0] = False
    probs = probs.masked_fill(dropped, 0.0)
    return torch.zeros_like(probs).scatter_(-1, order, probs / probs.sum(dim=-1, keepdim=True))


def _min_p(probs: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] -> [R, V] probabilities after min-p."""
    probs = probs.masked_fill(probs < column(rows.min_p, probs) * probs.amax(dim=-1, keepdim=True), 0.0)
    return probs / probs.sum(dim=-1, keepdim=True)


def column(values: np.ndarray, like: Tensor) -> Tensor:
    """[R] -> [R, 1]."""
    return torch.from_numpy(values).to(like)[:, None]
