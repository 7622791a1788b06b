"""Filters against those of transformers."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample
from toolkit_lm.sampling.filters import distribution


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
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


def test_greedy_rows_do_not_use_filters(make_rows, make_logits):
    table = make_logits(3)
    params = [SamplingParams(temperature=0, **p) for p in ({"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 1})]
    sampled = sample(table, make_rows(*params))
    assert sampled.token_ids == table.argmax(-1).tolist() and sampled.states == {}
