"""Filters of the distribution: top-k, top-p, min-p. Each works on what the one before leaves."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.sampling.batch import SamplingBatch
from toolkit_lm.sampling.transfer import to_device

_SELECTED = 256
"""Tokens that are sorted at first."""


def distribution(logits: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] float32 -> [R, V] the probabilities that tokens are drawn with, after temperature and
    filters."""
    # Shifting by the maximum first keeps tiny temperatures finite.
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / column(rows.temperature, logits)
    filtered = np.flatnonzero(rows.filtered)
    if len(filtered) == len(rows):
        return _filter(logits, rows)
    probs = torch.softmax(logits, dim=-1)
    if len(filtered):
        index = to_device(filtered, logits.device)
        probs[index] = _filter(logits[index], rows.select(filtered))
    return probs


def _filter(logits: Tensor, rows: SamplingBatch) -> Tensor:
    probs = torch.softmax(logits, dim=-1)
    sorting = np.flatnonzero((rows.top_k > 0) | (rows.top_p < 1))
    if len(sorting):
        index = to_device(sorting, logits.device)
        probs[index] = _top(logits[index], rows.select(sorting))
    users = np.flatnonzero(rows.min_p > 0)
    if len(users):
        index = to_device(users, probs.device)
        probs[index] = _min_p(probs[index], rows.select(users))
    return probs


def _top(logits: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] -> [R, V] probabilities after top-k and top-p, which keep the first of the tokens
    sorted by likelihood."""
    # Usually few tokens hold all that is kept, and sorting the others would take most of the time
    # of a step.
    likeliest = (
        logits.topk(min(_SELECTED, logits.shape[-1]), sorted=False).indices.sort(dim=-1).values
    )
    probs, is_certain = _first(logits, likeliest, rows)
    if len(index := (~is_certain).nonzero()[:, 0]):
        everything = torch.arange(logits.shape[-1], device=logits.device).expand(len(index), -1)
        probs[index], _ = _first(logits[index], everything, rows.select(index.cpu().numpy()))
    return probs


def _first(logits: Tensor, tokens: Tensor, rows: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Probabilities [R, V] after top-k and top-p of the tokens [R, S] alone, in their order. Also
    whether no other token could be kept [R]."""
    # Sorting the logits and not the probabilities keeps the order of tokens whose probabilities
    # round to the same.
    chosen, order = logits.gather(-1, tokens).sort(dim=-1, descending=True, stable=True)
    size = chosen.shape[-1]
    vocab_size = logits.shape[-1]
    top_k = to_device(np.where(rows.top_k > 0, rows.top_k, vocab_size), logits.device)[:, None]
    weights = (
        (chosen - chosen[:, :1])
        .exp()
        .masked_fill(torch.arange(size, device=logits.device) >= top_k, 0.0)
    )
    probs = weights / torch.where(
        top_k <= size, _total(weights), _total((logits - chosen[:, :1]).exp())
    )
    top_p = column(rows.top_p, probs)
    # 1.0 keeps all: rounding must not cut the tail off.
    dropped = (probs.cumsum(dim=-1, dtype=torch.float64) - probs >= top_p) & (top_p < 1)
    dropped[:, 0] = False
    probs = probs.masked_fill(dropped, 0.0)
    is_certain = ((probs > 0).sum(dim=-1) <= (chosen > chosen[:, -1:]).sum(dim=-1)) | (
        size == vocab_size
    )
    return torch.zeros_like(logits).scatter_(
        -1, tokens.gather(-1, order), probs / _total(probs)
    ), is_certain


def _min_p(probs: Tensor, rows: SamplingBatch) -> Tensor:
    """[R, V] -> [R, V] probabilities after min-p."""
    probs = probs.masked_fill(
        probs < column(rows.min_p, probs) * probs.amax(dim=-1, keepdim=True), 0.0
    )
    return probs / _total(probs)


def _total(x: Tensor) -> Tensor:
    """[R, V] -> [R, 1]. torch's sum adds the numbers of one row in another order than those of
    several; on a GPU its cumsum does, too."""
    return x.cumsum(dim=-1)[:, -1:]


def column(values: np.ndarray, like: Tensor) -> Tensor:
    """[R] -> [R, 1]."""
    return to_device(values, like.device).to(like.dtype)[:, None]
