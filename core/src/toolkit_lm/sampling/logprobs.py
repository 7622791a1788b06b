"""Log probabilities of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.messages import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, wanted: np.ndarray) -> list[TokenLogprobs]:
    """Per row of logits [R, V], the log probability of its token [R] and of the likeliest `wanted` [R] ones."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(min(int(wanted.max()), logprobs.shape[-1]), dim=-1)
    found = (column.tolist() for column in (token_ids, chosen[:, 0], ranks, top.indices, top.values))
    columns = zip(*found, wanted.tolist(), strict=True)
    return [TokenLogprobs([token, *ids[:n]], [logprob, *values[:n]], rank) for token, logprob, rank, ids, values, n in columns]
