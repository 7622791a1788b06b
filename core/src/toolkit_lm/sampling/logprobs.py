"""Log probabilities of tokens, or their logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.messages import TokenLogprobs
from toolkit_lm.sampling.transfer import to_device, to_host


def token_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    wanted: np.ndarray,
    named: np.ndarray | None = None,
    mode: str = "raw_logprobs",
) -> list[TokenLogprobs]:
    """Per row of logits [R, V], the log probability of its token [R] and of the likeliest `wanted`
    [R] ones.

    `named` [R] of objects: per row a list of token ids whose log probabilities are told, too, with
    their ranks; None where there is none. `mode`: SamplingBatch.logprobs_mode; with one of logits,
    these stand for the log probabilities.
    """
    logprobs = logits.float()
    if not mode.endswith("logits"):
        logprobs = torch.log_softmax(logprobs, dim=-1)
    chosen = logprobs.gather(-1, token_ids[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top = logprobs.topk(min(int(wanted.max()), logprobs.shape[-1]), dim=-1)
    found = (
        column.tolist()
        for column in to_host(token_ids, chosen[:, 0], ranks, top.indices, top.values)
    )
    columns = zip(*found, wanted.tolist(), strict=True)
    results = [
        TokenLogprobs([token, *ids[:n]], [logprob, *values[:n]], rank)
        for token, logprob, rank, ids, values, n in columns
    ]
    for row, ids in enumerate(() if named is None else named.tolist()):
        if ids:
            _add(results[row], logprobs[row], ids)
    return results


def _add(results: TokenLogprobs, logprobs: Tensor, token_ids: list[int]) -> None:
    """Adds log probabilities and ranks of the tokens that a request names. `logprobs` [V] are those
    of its row."""
    values = logprobs[to_device(np.array(token_ids), logprobs.device)]
    ranks = torch.stack([(logprobs > value).sum() for value in values]) + 1
    values, ranks = to_host(values, ranks)
    results.token_ids += token_ids
    results.logprobs += values.tolist()
    results.ranks = ranks.tolist()
