"""20,000 draws against the exact distribution, which is written by the definitions in float64 and plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample

VOCAB, DRAWS = 64, 20_000

CASES = {
    "t1": {},
    "t0.6": {"temperature": 0.6},
    "k7": {"temperature": 1.3, "top_k": 7},
    "p0.8": {"top_p": 0.8},
    "m0.1": {"min_p": 0.1},
    "typical0.5": {"typical_p": 0.5},
    "typical0.9": {"temperature": 0.7, "typical_p": 0.9},
    "k20p0.7m0.05": {"temperature": 0.9, "top_k": 20, "top_p": 0.7, "min_p": 0.05},
    "k30p0.9typical0.6": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "typical_p": 0.6},
    "k40p0.95m0.02typical0.8": {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.8},
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
        {"typical_p": 0.3},
    )
] + [SamplingParams(min_tokens=2, top_p=0.5)]


def top_k(probs, p):
    rank = np.argsort(np.argsort(-probs, kind="stable"))
    return rank < p.top_k


def top_p(probs, p):
    keep, total = np.zeros(len(probs), bool), 0.0
    for token in np.argsort(-probs, kind="stable"):
        if total >= p.top_p:
            break
        keep[token] = True
        total += probs[token]
    return keep


def min_p(probs, p):
    return probs >= p.min_p * probs.max()


def typical(probs, p):
    there = probs > 0
    surprise = np.where(there, -np.log(np.where(there, probs, 1)), np.inf)
    entropy = (probs[there] * surprise[there]).sum()
    keep, total = np.zeros(len(probs), bool), 0.0
    for token in np.argsort(np.abs(surprise - entropy), kind="stable"):
        keep[token] = True
        total += probs[token]
        if total >= p.typical_p:
            break
    return keep


def exact(row, p: SamplingParams) -> np.ndarray:
    scores = row.double().numpy() / p.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    for on, filter in ((p.top_k > 0, top_k), (p.top_p < 1, top_p), (p.min_p > 0, min_p), (p.typical_p < 1, typical)):
        if on:
            probs = np.where(filter(probs, p), probs, 0)
            probs /= probs.sum()
    return probs


def check(tokens, probs) -> None:
    counts, draws = np.bincount(tokens, minlength=VOCAB), len(tokens)
    assert counts[probs == 0].sum() == 0
    # Pearson's statistic over the tokens expected at least 5 times; the rest in one bin.
    common = probs * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probs[common], probs[~common].sum()) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic, freedom = ((observed - expected) ** 2 / expected).sum(), len(expected) - 1
    # Far in the tail of chi-square (mean = freedom, variance = 2 freedom): the draws are fixed by their seeds, so this cannot flake.
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_exact_distribution(make_rows, make_logits, case):
    params, row = SamplingParams(**CASES[case]), make_logits(1)[0]
    tokens = sample(row.expand(DRAWS, -1), make_rows(*[params] * DRAWS)).token_ids
    check(tokens, exact(row, params))


@pytest.mark.parametrize("case", CASES)
def test_the_same_with_31_other_rows_beside_it(make_rows, make_logits, case):
    assert len(OTHERS) == 31
    params, row, company = SamplingParams(**CASES[case]), make_logits(1)[0], make_logits(31, seed=5)
    drawn, at_once = [], 500
    for start in range(0, DRAWS, at_once):
        seeds = [5] * 15 + list(range(start, start + at_once)) + [5] * 16
        logits = torch.cat([company[:15], row.expand(at_once, -1), company[15:]])
        rows = make_rows(*OTHERS[:15], *[params] * at_once, *OTHERS[15:], seeds=seeds)
        drawn += sample(logits, rows).token_ids[15:-16]
    check(drawn, exact(row, params))
    assert drawn == sample(row.expand(DRAWS, -1), make_rows(*[params] * DRAWS)).token_ids
