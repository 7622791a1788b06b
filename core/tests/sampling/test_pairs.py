"""Every parameter with every other: a row gives the same alone as among others, and the others the
same without it."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample

PARAMETERS = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.02},
    "repetition_penalty": {"repetition_penalty": 1.5},
    "presence_penalty": {"presence_penalty": 1.0},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "bad_words": {"bad_words": ["a"]},
    "logit_bias": {"logit_bias": {5: 3.0, 6: -3.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 64, 2))},
    "min_tokens": {"min_tokens": 9},
    "logprobs": {"logprobs": 3},
}
PLAIN = [SamplingParams(temperature=t) for t in (1.0, 0.5, 0.0, 1.0, 1.5, 0.0, 1.0, 0.8)]
OUTPUT = [5, 6, 7, 5, 6]


def rows_of(make_rows, params, seeds):
    words = [[[9], [6, 7]] if p.bad_words else [] for p in params]
    num = len(params)
    return make_rows(
        *params,
        prompts=[[1, 2]] * num,
        outputs=[OUTPUT] * num,
        seeds=seeds,
        stops=[[4, 8]] * num,
        bad_words=words,
    )


@pytest.fixture(scope="module")
def plain_results(make_rows, make_logits):
    return sample(make_logits(8, seed=1) * 2, rows_of(make_rows, PLAIN, list(range(8)))).token_ids


@pytest.mark.parametrize("first", PARAMETERS)
def test_pairs(make_rows, make_logits, plain_results, first):
    table = make_logits(8, seed=1) * 2
    for second in PARAMETERS:
        if first != second and {first, second} != {"temperature", "greedy"}:
            params = SamplingParams(**{**PARAMETERS[first], **PARAMETERS[second], "max_tokens": 99})
            for seed in range(3):
                own = make_logits(1, seed=100 + seed) * 2
                alone = sample(own, rows_of(make_rows, [params], [seed]))
                logits = torch.cat([table[:3], own, table[3:]])
                among = sample(
                    logits,
                    rows_of(
                        make_rows, [*PLAIN[:3], params, *PLAIN[3:]], [0, 1, 2, seed, 3, 4, 5, 6, 7]
                    ),
                )
                assert among.token_ids[3] == alone.token_ids[0], (second, seed)
                assert among.token_ids[:3] + among.token_ids[4:] == plain_results
                assert not alone.errors and not among.errors


def test_all_at_once(make_rows, make_logits):
    """One row per parameter, and one of all of them, in one batch: each is what it is alone."""
    everything = {
        name: value for fields in PARAMETERS.values() for name, value in fields.items()
    } | {"temperature": 0.9}
    params = [
        SamplingParams(**fields, max_tokens=99) for fields in (*PARAMETERS.values(), everything)
    ]
    params += [
        SamplingParams(**{**PARAMETERS[a], **PARAMETERS[b]}, max_tokens=99)
        for a, b in list(combinations(PARAMETERS, 2))[::5]
    ]
    table = make_logits(len(params), seed=3)
    together = sample(table, rows_of(make_rows, params, list(range(len(params)))))
    assert not together.errors
    for i, one in enumerate(params):
        assert sample(table[i : i + 1], rows_of(make_rows, [one], [i])).token_ids == [
            together.token_ids[i]
        ]


def test_the_logits_are_left_as_they_are(make_rows, make_logits):
    params = [SamplingParams(**fields, max_tokens=99) for fields in PARAMETERS.values()]
    table = make_logits(len(params))
    before = table.clone()
    sample(table, rows_of(make_rows, params, list(range(len(params)))))
    assert torch.equal(table, before)
