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
    params = [
        SamplingParams(temperature=0, **p) for p in ({"top_p": 0.01}, {"min_p": 1.0}, {"top_k": 1})
    ]
    sampled = sample(table, make_rows(*params))
    assert sampled.token_ids == table.argmax(-1).tolist() and sampled.states == {}


TOP = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40},
    {"top_k": 500},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"top_k": 7, "top_p": 0.5},
]
SHAPES = {
    "sharp": lambda rows: rows * 8,
    "flat": lambda rows: rows * 1e-3,
    "equals": lambda rows: rows.round(),
    "all equal": lambda rows: rows * 0,
    "few allowed": lambda rows: torch.where(
        torch.arange(rows.shape[1]) % 150 == 7, rows, -torch.inf
    ),
    "one allowed": lambda rows: torch.where(torch.arange(rows.shape[1]) == 900, rows, -torch.inf),
}


@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_is_sorted_makes_no_difference(monkeypatch, make_rows, make_logits, shape):
    """A few of the likeliest tokens, or all; and the rows beside."""
    logits = SHAPES[shape](make_logits(len(TOP), vocab=1000))
    rows = make_rows(*[SamplingParams(**fields) for fields in TOP])
    monkeypatch.setattr("toolkit_lm.sampling.filters._SELECTED", 16)
    few = distribution(logits, rows)
    for i, fields in enumerate(TOP):
        assert torch.equal(
            distribution(logits[i : i + 1], make_rows(SamplingParams(**fields)))[0], few[i]
        ), fields
    monkeypatch.setattr("toolkit_lm.sampling.filters._SELECTED", 1000)
    every = distribution(logits, rows)
    assert torch.equal(few > 0, every > 0)
    torch.testing.assert_close(few, every, atol=1e-6, rtol=1e-5)


def test_few_tokens_are_sorted(monkeypatch, make_rows, make_logits):
    sizes = []
    sort = torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor,
        "sort",
        lambda self, *how, **more: sizes.append(self.shape) or sort(self, *how, **more),
    )
    distribution(make_logits(4, vocab=5000) * 8, make_rows(*[SamplingParams(top_p=0.9)] * 4))
    assert {tuple(size) for size in sizes} == {(4, 256)}


def test_a_row_alone_is_what_it_is_beside_others(make_rows):
    """With a large vocabulary, in several threads."""
    before = torch.get_num_threads()
    logits = torch.randn(7, 100_003, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(**fields)
        for fields in (
            {"top_p": 0.95},
            {"min_p": 0.01},
            {"top_k": 50_000, "min_p": 1e-6},
            {"top_p": 0.5},
        )
    ]
    try:
        torch.set_num_threads(2)
        for one in params:
            together = distribution(logits, make_rows(*[one] * 7))
            for row in range(7):
                assert torch.equal(
                    distribution(logits[row : row + 1], make_rows(one)), together[row : row + 1]
                )
    finally:
        torch.set_num_threads(before)
