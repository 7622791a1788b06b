"""Log probabilities of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.messages import TokenLogprobs


def token_logprobs(logits: Tensor, token_ids: Tensor, wanted: np.ndarray) -> list[TokenLogprobs]:
    """Per row of logits [R, V], the log probability of its token [R] and of the likeliest `wanted` [R] ones."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    chosen = token_ids[:, None]
    chosen_logprobs = logprobs.gather(-1, chosen)
    ranks = ((logprobs > chosen_logprobs).sum(dim=-1) + 1).tolist()
    top = logprobs.topk(min(int(wanted.max()), logprobs.shape[-1]), dim=-1)
    columns = zip(
        chosen[:, 0].tolist(),
        chosen_logprobs[:, 0].tolist(),
        ranks,
        top.indices.tolist(),
        top.values.tolist(),
        wanted.tolist(),
        strict=True,
    )
    return [TokenLogprobs([token, *ids[:n]], [logprob, *values[:n]], rank) for token, logprob, rank, ids, values, n in columns]
