"""Rows for the sampler, made of sampling parameters and tokens."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.messages import NewSequence, SequenceInputs, TokenizedParams
from toolkit_lm.sampling import SamplingBatch, TokenHistory


def _make_rows(*params, prompts=None, outputs=None, seeds=None, stops=None, words=None, mu=None, processors=None) -> SamplingBatch:
    """One row per SamplingParams; the other arguments are lists, one entry per row, but for `processors`."""
    num = len(params)
    prompts = prompts or [[0]] * num
    outputs = outputs or [[]] * num
    history = TokenHistory(num, 1 + max(len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)))
    rows = SamplingBatch(history, processors)
    for i, one in enumerate(params):
        tokens = [*prompts[i], *outputs[i]]
        history.set(i, tokens, len(prompts[i]))
        seq = NewSequence(
            seq_id=i,
            token_ids=tokens,
            num_prompt_tokens=len(prompts[i]),
            num_computed_tokens=0,
            block_tables=[],
            params=one,
            seed=seeds[i] if seeds else i,
            stop_token_ids=stops[i] if stops else [],
            inputs=SequenceInputs(tokenized_params=words[i] if words else TokenizedParams()),
            sampler_state={"mirostat_mu": mu[i]} if mu and mu[i] is not None else {},
        )
        rows.set(i, seq)
    return rows


@pytest.fixture(scope="session")
def make_rows():
    return _make_rows


@pytest.fixture(scope="session")
def make_logits():
    """make_logits(rows, seed=0, vocab=64) -> [rows, vocab] normal float32."""
    return lambda rows, seed=0, vocab=64: torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
