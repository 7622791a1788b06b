from __future__ import annotations

import numpy as np
import pytest
import torch
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample, uniform

VOCAB = 64


def logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


DISTRIBUTIONS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.1),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.7, min_p=0.05),
]


def test_a_row_does_not_depend_on_its_batch(make_rows):
    params = [*DISTRIBUTIONS, SamplingParams(temperature=0), SamplingParams(temperature=0.0001)]
    table = logits(len(params), seed=3)
    together = sample(table.clone(), make_rows(*params)).token_ids
    for i, p in enumerate(params):
        assert sample(table[i : i + 1].clone(), make_rows(p, seeds=[i])).token_ids == [together[i]]


def test_greedy_takes_the_likeliest(make_rows):
    table = logits(5)
    assert (
        sample(table.clone(), make_rows(*[SamplingParams(temperature=0)] * 5)).token_ids
        == table.argmax(-1).tolist()
    )


def test_a_tiny_temperature_is_finite(make_rows):
    table = logits(1) * 1e4
    assert (
        sample(table.clone(), make_rows(SamplingParams(temperature=2e-5))).token_ids
        == table.argmax(-1).tolist()
    )


def test_positions_and_seeds_give_different_numbers():
    seeds = np.arange(1000, dtype=np.uint64)
    positions = np.zeros(1000, np.int64)
    by_seed = uniform(seeds, positions)
    by_position = uniform(np.zeros(1000, np.uint64), np.arange(1000))
    for numbers in (by_seed, by_position):
        assert len(np.unique(numbers)) == 1000 and numbers.min() >= 0 and numbers.max() < 1
        assert (
            abs(numbers.mean() - 0.5) < 0.05
            and abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.1
        )
    assert abs(np.corrcoef(by_seed, by_position)[0, 1]) < 0.1
    assert (uniform(seeds, positions, stream=1) != by_seed).all()


def test_min_tokens_rules_stops_out_until_then(make_rows):
    table = logits(2)
    best = table.argmax(-1).tolist()
    params = SamplingParams(temperature=0, min_tokens=3, max_tokens=9)
    drawn = sample(
        table.clone(), make_rows(params, params, outputs=[[0] * 2, [0] * 3], stops=[best, best])
    ).token_ids
    assert drawn[0] not in best and drawn[1] == best[1]


def test_logprobs_are_of_the_raw_distribution(make_rows):
    table = logits(3)
    params = [
        SamplingParams(temperature=0.5, logprobs=2),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0),
    ]
    sampled = sample(table.clone(), make_rows(*params))
    expected = torch.log_softmax(table, -1)
    first, none, only = sampled.logprobs
    assert none is None and len(only.token_ids) == 1 and only.rank == 1
    assert first.token_ids[1:] == table[0].topk(2).indices.tolist()
    assert first.token_ids[0] == sampled.token_ids[0]
    assert first.logprobs == pytest.approx([expected[0, t].item() for t in first.token_ids])
    assert first.rank == int((expected[0] > expected[0, first.token_ids[0]]).sum()) + 1


MODES = ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits")


def values_of_mode(row, params, mode):
    """What a mode tells of one row of logits [V], in float64."""
    row = row.double()
    if mode.startswith("processed"):
        for token, bias in (params.logit_bias or {}).items():
            row[token] += bias
        if params.temperature:
            row /= params.temperature
        if params.top_k:
            row[row < row.topk(params.top_k).values[-1]] = -torch.inf
        if params.top_p < 1:
            order = row.argsort(descending=True)
            probs = torch.softmax(row[order], -1)
            row[order[probs.cumsum(-1) - probs >= params.top_p]] = -torch.inf
    return row if mode.endswith("logits") else torch.log_softmax(row, -1)


@pytest.mark.parametrize("mode", MODES)
def test_logprobs_mode(make_rows, mode):
    """Values before or after parameters, of rows that are drawn, greedy and without any."""
    table = logits(4, seed=5)
    bias = {3: 4.0, 9: -2.0}
    params = [
        SamplingParams(temperature=0.7, top_k=5, logprobs=8, logit_bias=bias),
        SamplingParams(temperature=0, logprobs=3, logit_bias=bias),
        SamplingParams(temperature=1.3, top_p=0.6, logprobs=0),
        SamplingParams(temperature=0.5),
    ]
    plain = sample(table.clone(), make_rows(*params)).token_ids
    rows = make_rows(*params)
    rows.logprobs_mode = mode
    sampled = sample(table.clone(), rows)
    assert sampled.token_ids == plain
    assert sampled.logprobs[3] is None
    for row, found in enumerate(sampled.logprobs[:3]):
        expected = values_of_mode(table[row], params[row], mode)
        values = [expected[token].item() for token in found.token_ids]
        assert found.logprobs == pytest.approx(values, abs=1e-5)
        assert found.rank == int((expected > expected[found.token_ids[0]]).sum()) + 1
        assert found.logprobs[1:] == sorted(found.logprobs[1:], reverse=True)


def test_logprobs_of_the_tokens_that_a_request_names(make_rows):
    """In the place of the likeliest ones, with their ranks; a row beside it is as it would be
    alone."""
    table = logits(2)
    params = [
        SamplingParams(temperature=0, logprob_token_ids=[7, 3]),
        SamplingParams(temperature=0, logprobs=1),
    ]
    named, usual = sample(table.clone(), make_rows(*params)).logprobs
    expected = torch.log_softmax(table, -1)
    assert named.token_ids[1:] == [7, 3] and named.rank == 1
    assert named.logprobs == pytest.approx([expected[0, token].item() for token in named.token_ids])
    assert named.ranks == [int((expected[0] > expected[0, token]).sum()) + 1 for token in (7, 3)]
    assert len(usual.token_ids) == 2 and usual.ranks is None


def test_a_row_of_nan_fails_alone(make_rows):
    table = logits(4)
    table[1, 5] = torch.nan
    table[2] = -torch.inf
    clean = sample(logits(4), make_rows(*[SamplingParams()] * 4)).token_ids
    sampled = sample(table, make_rows(*[SamplingParams()] * 4))
    assert set(sampled.errors) == {1, 2}
    assert [sampled.token_ids[i] for i in (0, 3)] == [clean[0], clean[3]]
