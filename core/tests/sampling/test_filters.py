"""Typical-p against transformers; XTC and mirostat against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample, uniform
from toolkit_lm.sampling.filters import XTC_STREAM, distribution


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("TypicalLogitsWarper", "typical_p", 0.3),
        ("TypicalLogitsWarper", "typical_p", 0.9),
        ("TopKLogitsWarper", "top_k", 5),
        ("TopPLogitsWarper", "top_p", 0.7),
        ("MinPLogitsWarper", "min_p", 0.1),
    ],
)
def test_filters_are_those_of_transformers(make_rows, make_logits, name, field, value):
    import transformers

    logits = make_logits(6) * 2
    theirs = torch.softmax(getattr(transformers, name)(value)(None, logits.clone()), dim=-1)
    ours = distribution(logits, make_rows(*[SamplingParams(**{field: value})] * 6))
    assert ((ours > 0) == (theirs > 0)).all()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_xtc_excludes_top_choices(make_rows, make_logits):
    rows = 400
    params = SamplingParams(xtc_probability=0.4, xtc_threshold=0.05)
    logits = make_logits(1).expand(rows, -1)
    probs = torch.softmax(logits[0], dim=-1).numpy()
    top = np.flatnonzero(probs >= 0.05)
    kept = np.ones(len(probs), bool)
    kept[top[np.argsort(-probs[top])[:-1]]] = False
    assert len(top) >= 2
    applied = uniform(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64), XTC_STREAM) < 0.4
    assert 0.3 < applied.mean() < 0.5
    ours = distribution(logits, make_rows(*[params] * rows)).numpy()
    for row, excluded in zip(ours, applied, strict=True):
        expected = probs * (kept if excluded else 1)
        assert np.allclose(row, expected / expected.sum(), atol=1e-6)


def test_xtc_leaves_a_single_top_choice(make_rows):
    logits = torch.tensor([[5.0, 1.0, 1.0]])
    ours = distribution(logits, make_rows(SamplingParams(xtc_probability=1, xtc_threshold=0.3)))
    assert torch.allclose(ours, torch.softmax(logits, dim=-1))


def test_mirostat_is_its_definition(make_rows, make_logits):
    """Version 2 as Basu et al. state it: keep tokens of at most mu bits, draw, and move mu by the surprise of the draw."""
    params = SamplingParams(mirostat_tau=3.0, mirostat_eta=0.3)
    mu, surprises = None, []
    for position in range(300):
        logits = make_logits(1, seed=position, vocab=200) * 3
        rows = make_rows(params, outputs=[[0] * position], mu=[mu])
        before = 6.0 if mu is None else mu
        probs = torch.softmax(logits[0].double(), dim=-1).numpy()
        kept = -np.log2(probs) <= before
        kept[probs.argmax()] = True
        left = np.where(kept, probs, 0) / probs[kept].sum()
        sampled = sample(logits, rows)
        [token], mu = sampled.token_ids, sampled.mirostat_mu[0]
        assert left[token] > 0
        surprises.append(-math.log2(left[token]))
        assert mu == pytest.approx(before - 0.3 * (surprises[-1] - 3.0), abs=1e-4)
    assert np.mean(surprises) == pytest.approx(3.0, abs=0.25)


def test_greedy_rows_do_not_use_filters(make_rows, make_logits):
    table = make_logits(3)
    params = [SamplingParams(temperature=0, **p) for p in ({"xtc_probability": 1}, {"mirostat_tau": 1.0}, {"typical_p": 0.01})]
    sampled = sample(table, make_rows(*params))
    assert sampled.token_ids == table.argmax(-1).tolist() and sampled.mirostat_mu == {}
