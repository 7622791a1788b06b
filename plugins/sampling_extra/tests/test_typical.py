"""20,000 draws of typical sampling against the exact distribution, after core's filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exact_distribution import DRAWS, check, exact
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample

CASES = {
    "typical0.5": {"typical_p": 0.5},
    "typical0.9": {"temperature": 0.7, "typical_p": 0.9},
    "k30p0.9typical0.6": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "typical_p": 0.6},
    "k40p0.95m0.02typical0.8": {
        "temperature": 1.5,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.02,
        "typical_p": 0.8,
    },
}


OTHERS = [
    {**extra, "temperature": temperature}
    for temperature in (0, 0.5, 1.0)
    for extra in (
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8, "top_k": 30},
        {"logit_bias": {3: 5.0}},
        {"allowed_token_ids": [1, 2, 3]},
        {"min_p": 0.1},
        {"logprobs": 2},
        {"top_p": 0.5, "top_k": 9},
        {"typical_p": 0.3},
        {"xtc_probability": 0.5, "epsilon_cutoff": 0.01, "mirostat_tau": 4.0},
    )
] + [{"min_tokens": 2, "typical_p": 0.5}]


def typical(probs, p):
    there = probs > 0
    surprise = np.where(there, -np.log(np.where(there, probs, 1)), np.inf)
    entropy = (probs[there] * surprise[there]).sum()
    keep = np.zeros(len(probs), bool)
    total = 0.0
    for token in np.argsort(np.abs(surprise - entropy), kind="stable"):
        keep[token] = True
        total += probs[token]
        if total >= p:
            break
    return keep


def expected(row, fields):
    core = SamplingParams(**{name: value for name, value in fields.items() if name != "typical_p"})
    return exact(row, core, lambda probs: typical(probs, fields["typical_p"]))


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(make_rows, make_logits, case):
    fields = CASES[case]
    row = make_logits(1)[0]
    check(
        sample(row.expand(DRAWS, -1), make_rows(*[fields] * DRAWS)).token_ids, expected(row, fields)
    )


@pytest.mark.parametrize("case", CASES)
def test_the_same_with_31_other_rows_beside_it(make_rows, make_logits, case):
    assert len(OTHERS) == 31
    fields = CASES[case]
    row = make_logits(1)[0]
    company = make_logits(31, seed=5)
    drawn = []
    at_once = 500
    for start in range(0, DRAWS, at_once):
        seeds = [5] * 15 + list(range(start, start + at_once)) + [5] * 16
        logits = torch.cat([company[:15], row.expand(at_once, -1), company[15:]])
        sampled = sample(
            logits, make_rows(*OTHERS[:15], *[fields] * at_once, *OTHERS[15:], seeds=seeds)
        )
        assert not sampled.errors
        drawn += sampled.token_ids[15:-16]
    check(drawn, expected(row, fields))
    assert drawn == sample(row.expand(DRAWS, -1), make_rows(*[fields] * DRAWS)).token_ids


def test_equally_typical_tokens_are_kept_together(make_rows, filtered):
    """One token is enough, but its equals stay with it; of any distribution something stays."""
    probs = torch.tensor([[0.4, 0.2, 0.2, 0.2, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    kept = filtered(probs, make_rows(*[{"typical_p": 0.01}] * 2))
    assert torch.allclose(kept, torch.tensor([[0, 1 / 3, 1 / 3, 1 / 3, 0], [1, 0, 0, 0, 0]]))


@pytest.mark.parametrize(
    "other",
    [
        {"epsilon_cutoff": 0.04},
        {"xtc_probability": 1, "xtc_threshold": 0.04},
        {"mirostat_tau": 2.0},
    ],
    ids=lambda other: next(iter(other)),
)
def test_it_works_before_the_other_filters(make_rows, make_logits, filtered, other):
    probs = torch.softmax(make_logits(8) * 1.5, dim=-1)
    ours = {"typical_p": 0.7}

    def one_after_the_other(*steps):
        values = probs
        for fields in steps:
            values = filtered(values, make_rows(*[fields] * 8))
        return values

    together = filtered(probs, make_rows(*[{**other, **ours}] * 8))
    assert torch.equal(together, one_after_the_other(ours, other))
    assert not torch.equal(together, one_after_the_other(other, ours))
