"""The distribution that tokens are drawn from, by the definitions in float64 and plain Python, and
how draws are compared with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from toolkit_lm.params import SamplingParams

VOCAB = 64
DRAWS = 20_000


def top_k(probs, k):
    rank = np.argsort(np.argsort(-probs, kind="stable"))
    return rank < k


def top_p(probs, p):
    keep = np.zeros(len(probs), bool)
    total = 0.0
    for token in np.argsort(-probs, kind="stable"):
        if total >= p:
            break
        keep[token] = True
        total += probs[token]
    return keep


def min_p(probs, p):
    return probs >= p * probs.max()


def exact(row, p: SamplingParams, *more: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[V] the probabilities that `p` makes of logits. `more`: filters of plugins; each says which
    tokens of a distribution are kept."""
    scores = row.double().numpy() / p.temperature
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    own = (
        (p.top_k > 0, lambda probs: top_k(probs, p.top_k)),
        (p.top_p < 1, lambda probs: top_p(probs, p.top_p)),
    )
    filters = [
        *own,
        (p.min_p > 0, lambda probs: min_p(probs, p.min_p)),
        *((True, one) for one in more),
    ]
    for on, keeps in filters:
        if on:
            probs = np.where(keeps(probs), probs, 0)
            probs /= probs.sum()
    return probs


def check(tokens, probs) -> None:
    """Raises AssertionError where draws do not follow a distribution [V]."""
    counts = np.bincount(tokens, minlength=VOCAB)
    draws = len(tokens)
    assert counts[probs == 0].sum() == 0
    # Pearson's statistic over the tokens expected at least 5 times; the rest in one bin.
    common = probs * draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(probs[common], probs[~common].sum()) * draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = len(expected) - 1
    # Far in the tail of chi-square (mean = freedom, variance = 2 freedom): the draws are fixed by
    # their seeds, so this cannot flake.
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom)
