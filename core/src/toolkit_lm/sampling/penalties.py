"""Penalties on tokens that occurred before: repetition, presence, frequency."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.sampling.batch import SamplingBatch
from toolkit_lm.sampling.filters import column
from toolkit_lm.sampling.transfer import to_device


def penalize(logits: Tensor, rows: SamplingBatch) -> None:
    """Applies the penalties to logits [R, V], in place. Rows without penalties stay as they are."""
    repeating = np.flatnonzero(rows.repetition_penalty != 1)
    if len(repeating):
        index = to_device(repeating, logits.device)
        penalty = column(rows.repetition_penalty[repeating], logits)
        some = logits[index]
        scaled = torch.where(some > 0, some / penalty, some * penalty)
        logits[index] = torch.where(
            _counts(rows, repeating, logits, output_only=False) > 0, scaled, some
        )
    counting = np.flatnonzero((rows.presence_penalty != 0) | (rows.frequency_penalty != 0))
    if len(counting):
        index = to_device(counting, logits.device)
        counts = _counts(rows, counting, logits, output_only=True)
        presence = column(rows.presence_penalty[counting], logits)
        frequency = column(rows.frequency_penalty[counting], logits)
        logits[index] -= presence * (counts > 0) + frequency * counts


def _counts(rows: SamplingBatch, index: np.ndarray, logits: Tensor, *, output_only: bool) -> Tensor:
    """Number of times that each token occurs in the sequence, or in its output: [R, V]. Drafts that
    are taken as drawn count."""
    vocab_size = logits.shape[-1]
    places = rows.row[index]
    num_drafts = rows.num_drafts[index]
    # Positions of one sequence are a run, and have its tokens in common: these are counted once.
    begins = num_drafts == 0
    unique = places[begins]
    tokens = rows.history.padded(unique, output_only=output_only, fill=vocab_size)
    counts = _add_counts(logits.new_zeros(len(unique), vocab_size + 1), tokens)
    if len(unique) < len(places):
        counts = counts[to_device(begins.cumsum() - 1, logits.device)]
        drafts = rows.history.drafts(places, num_drafts, fill=vocab_size)
        counts = _add_counts(counts, drafts)
    return counts[:, :-1]


def _add_counts(counts: Tensor, token_ids: np.ndarray) -> Tensor:
    """Counts tokens [R, N] in counts [R, V + 1], in place."""
    tokens = to_device(token_ids, counts.device)
    return counts.scatter_add_(-1, tokens, torch.ones_like(tokens, dtype=counts.dtype))
