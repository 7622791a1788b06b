"""20,000 draws against the exact distribution."""

from __future__ import annotations

import pytest
import torch
from exact_distribution import DRAWS, check, exact
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample

CASES = {
    "t1": {},
    "t0.6": {"temperature": 0.6},
    "k7": {"temperature": 1.3, "top_k": 7},
    "p0.8": {"top_p": 0.8},
    "m0.1": {"min_p": 0.1},
    "k20p0.7m0.05": {"temperature": 0.9, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    "k30p0.9": {"temperature": 1.2, "top_k": 30, "top_p": 0.9},
    "k40p0.95m0.02": {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
}


OTHERS = [
    SamplingParams(**extra, temperature=temperature)
    for temperature in (0, 0.5, 1.0)
    for extra in (
        {},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
        {"repetition_penalty": 0.8, "top_k": 30},
        {"logit_bias": {3: 5.0}},
        {"allowed_token_ids": [1, 2, 3]},
        {"min_p": 0.1},
        {"logprobs": 2},
        {"top_p": 0.5, "top_k": 9},
        {"min_p": 0.02, "top_p": 0.7},
    )
] + [SamplingParams(min_tokens=2, top_p=0.5)]


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(make_rows, make_logits, case):
    params = SamplingParams(**CASES[case])
    row = make_logits(1)[0]
    tokens = sample(row.expand(DRAWS, -1), make_rows(*[params] * DRAWS)).token_ids
    check(tokens, exact(row, params))


@pytest.mark.parametrize("case", CASES)
def test_the_same_with_31_other_rows_beside_it(make_rows, make_logits, case):
    assert len(OTHERS) == 31
    params = SamplingParams(**CASES[case])
    row = make_logits(1)[0]
    company = make_logits(31, seed=5)
    drawn = []
    at_once = 500
    for start in range(0, DRAWS, at_once):
        seeds = [5] * 15 + list(range(start, start + at_once)) + [5] * 16
        logits = torch.cat([company[:15], row.expand(at_once, -1), company[15:]])
        rows = make_rows(*OTHERS[:15], *[params] * at_once, *OTHERS[15:], seeds=seeds)
        drawn += sample(logits, rows).token_ids[15:-16]
    check(drawn, exact(row, params))
    assert drawn == sample(row.expand(DRAWS, -1), make_rows(*[params] * DRAWS)).token_ids
