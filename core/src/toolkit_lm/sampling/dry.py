"""DRY, "don't repeat yourself": a token that would go on with a repetition is the less likely the longer the repetition is.

As its author states it (p-e-w, text-generation-webui, pull request 5677).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.sampling.batch import SamplingBatch

_LONGEST = 50
"""Longer repetitions count as this: the penalty is far beyond any logit by then."""


def dry(logits: Tensor, rows: SamplingBatch) -> None:
    """Changes logits [R, V] in place, those of the rows that have a dry_multiplier."""
    users = np.flatnonzero(rows.dry_multiplier > 0)
    if not len(users):
        return
    row, token, length = _repetitions(rows, users)
    excess = length - rows.dry_allowed_length[users[row]]
    row, token, excess = row[excess >= 0], token[excess >= 0], excess[excess >= 0]
    user = users[row]
    # Float64 holds 1000 * 100 ** 50; a penalty that float32 does not is infinite, and rules the token out.
    penalties = rows.dry_multiplier[user].astype(np.float64) * rows.dry_base[user].astype(np.float64) ** excess
    device = logits.device
    total = torch.zeros(len(users), logits.shape[-1], dtype=torch.float64, device=device)
    flat = torch.from_numpy(row * logits.shape[-1] + token).to(device)
    # A token that goes on with several repetitions is judged by the longest.
    total.view(-1).scatter_reduce_(0, flat, torch.from_numpy(penalties).to(device), "amax")
    logits[torch.from_numpy(users).to(device)] -= total.to(logits.dtype)


def _repetitions(rows: SamplingBatch, users: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index into users, next token, length) of each earlier place that matches the end of its sequence."""
    tokens = rows.history.padded(rows.row[users], fill=-1)
    ends = rows.history.num_tokens[rows.row[users]] - 1
    broken = np.stack([np.isin(line, rows.rules[user].dry_breakers) for line, user in zip(tokens, users, strict=True)])
    index = np.arange(len(users))
    # The last token itself is no earlier place, and across a breaker nothing is repeated.
    same = (tokens == tokens[index, ends][:, None]) & ~broken
    same[index, ends] = False
    row, place = np.nonzero(same)
    following = tokens[row, place + 1]
    kept = ~broken[row, place + 1]
    row, place, following = row[kept], place[kept], following[kept]
    length = np.ones(len(row), np.int64)
    alive = np.arange(len(row))
    for back in range(1, _LONGEST):
        alive = alive[place[alive] >= back]
        before, expected = place[alive] - back, ends[row[alive]] - back
        matches = (tokens[row[alive], before] == tokens[row[alive], expected]) & ~broken[row[alive], before]
        alive = alive[matches]
        if not len(alive):
            break
        length[alive] += 1
    return row, following, length
