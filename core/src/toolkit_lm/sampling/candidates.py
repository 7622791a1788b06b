"""Beam search: the likeliest tokens of each row of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from toolkit_lm.messages import Candidates
from toolkit_lm.sampling.batch import SamplingBatch
from toolkit_lm.sampling.masks import mask
from toolkit_lm.sampling.transfer import to_host


class BeamCandidates(NamedTuple):
    """Result of `top_candidates` for the rows of beam searches."""

    candidates: dict[int, Candidates]
    """Candidates by row. Fewer than asked for where the vocabulary, or the request's masks, leave
    no more."""
    errors: dict[int, str]
    """Messages by row: logits that hold NaN, or a plugin's logits processor that failed."""


def top_candidates(logits: Tensor, rows: SamplingBatch) -> BeamCandidates:
    """The `num_candidates` likeliest tokens of each row of logits [R, V], any float dtype. The
    logits are left as they are.

    Log probabilities are of the model's own distribution; masks and processors of the stage
    "logits" come after, and take nothing off the tokens that they leave.
    """
    are_finite = torch.isfinite(logits.amax(dim=-1))
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    mask(logprobs, rows)
    failed: dict[int, str] = {}
    if rows.processors is not None and rows.processors.names:
        rows.processors.apply(logprobs, rows.key.tolist(), rows.processor_row, "logits")
        failed = rows.processors.errors
    best = logprobs.topk(min(int(rows.num_candidates.max()), logprobs.shape[-1]), dim=-1)
    found = BeamCandidates({}, {})
    on_host = (column.tolist() for column in to_host(best.indices, best.values, are_finite))
    columns = zip(rows.num_candidates.tolist(), *on_host, strict=True)
    for row, (wanted, token_ids, values, is_finite) in enumerate(columns):
        if (key := int(rows.key[row])) in failed:
            found.errors[row] = failed[key]
        elif is_finite:
            left = sum(value > -torch.inf for value in values[:wanted])
            found.candidates[row] = Candidates(token_ids[:left], values[:left])
        else:
            found.errors[row] = "the model's logits are not finite"
    return found
