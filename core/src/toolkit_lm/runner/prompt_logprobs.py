"""Log probabilities of prompt tokens, from the hidden states of a prefill."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.attention import logits_of_tokens
from toolkit_lm.messages import TokenLogprobs
from toolkit_lm.runner.batch import PersistentBatch
from toolkit_lm.sampling import token_logprobs
from toolkit_lm.step import StepInputs

_MOST_ROWS = 128
"""Number of tokens whose logits [rows, V] are computed at a time, however long the chunk is."""


def prompt_logprobs(
    inputs: StepInputs,
    batch: PersistentBatch,
    hidden_states: Tensor,
    compute_logits: Callable[[Tensor], Tensor],
) -> dict[int, list[TokenLogprobs]]:
    """Log probabilities of the prompt tokens after those that this step computed, by seq_id. Those
    that were returned before are left out."""
    found: dict[int, list[TokenLogprobs]] = {}
    for index in np.flatnonzero(batch.sampling.prompt_logprobs[inputs.rows] >= 0):
        row = int(inputs.rows[index])
        offset = int(inputs.query_start[index])
        end = int(inputs.query_start[index + 1])
        start = int(inputs.starts[index])
        # The hidden state at a position predicts the next token.
        first = max(start, int(batch.num_prompt_logprobs[row]))
        last = min(start + end - offset, int(batch.history.num_prompt_tokens[row]) - 1)
        known: list[TokenLogprobs] = []
        for position in range(first, last, _MOST_ROWS):
            stop = min(position + _MOST_ROWS, last)
            at = offset + position - start
            tokens = torch.arange(at, at + stop - position, device=hidden_states.device)
            with logits_of_tokens(tokens):
                logits = compute_logits(hidden_states[at : at + stop - position])
            token_ids = batch.history.token_ids[row, position + 1 : stop + 1].astype(np.int64)
            following = torch.from_numpy(token_ids).to(logits.device, non_blocking=True)
            known += token_logprobs(
                logits,
                following,
                np.full(stop - position, batch.sampling.prompt_logprobs[row]),
                mode=batch.sampling.logprobs_mode,
            )
        if known:
            batch.num_prompt_logprobs[row] = last
            found[inputs.plan.scheduled[index].seq_id] = known
    return found
