"""Each parameter with every other, core's among them: a row gives the same alone as among others,
and the others the same without it."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from toolkit_lm.sampling import sample

OURS = {
    "xtc": {"xtc_probability": 0.8, "xtc_threshold": 0.04},
    "mirostat": {"mirostat_tau": 4.0},
    "dry": {"dry_multiplier": 1.0},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "typical_p": {"typical_p": 0.8},
}
PARAMETERS = OURS | {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.02},
    "penalties": {"repetition_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "bad_words": {"bad_words": ["a"]},
    "logit_bias": {"logit_bias": {5: 3.0, 6: -3.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(0, 64, 2))},
    "min_tokens": {"min_tokens": 9},
    "logprobs": {"logprobs": 3},
}
PLAIN = [{"temperature": t} for t in (1.0, 0.5, 0.0, 1.0, 1.5, 0.0, 1.0, 0.8)]
OUTPUT = [5, 6, 7, 5, 6]


def rows_of(make_rows, params, seeds):
    num = len(params)
    params = [{**one, "max_tokens": 99} for one in params]
    words = [[[9], [6, 7]] if "bad_words" in one else [] for one in params]
    return make_rows(
        *params,
        prompts=[[1, 2]] * num,
        outputs=[OUTPUT] * num,
        seeds=seeds,
        stops=[[4, 8]] * num,
        bad_words=words,
    )


@pytest.mark.parametrize("first", OURS)
def test_pairs(make_rows, make_logits, first):
    table = make_logits(8, seed=1) * 2
    plain = sample(table, rows_of(make_rows, PLAIN, list(range(8)))).token_ids
    for second in PARAMETERS:
        if first != second:
            params = {**PARAMETERS[first], **PARAMETERS[second]}
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
                assert among.states.get(3) == alone.states.get(0)
                assert among.token_ids[:3] + among.token_ids[4:] == plain
                assert not alone.errors and not among.errors


def test_all_at_once(make_rows, make_logits):
    """One row per parameter, and one of all of them, in one batch: each is what it is alone."""
    everything = {
        name: value for fields in PARAMETERS.values() for name, value in fields.items()
    } | {"temperature": 0.9}
    params = [*PARAMETERS.values(), everything]
    params += [
        {**PARAMETERS[a], **PARAMETERS[b]} for a, b in list(combinations(PARAMETERS, 2))[::5]
    ]
    table = make_logits(len(params), seed=3)
    before = table.clone()
    together = sample(table, rows_of(make_rows, params, list(range(len(params)))))
    assert not together.errors and torch.equal(table, before)
    for i, one in enumerate(params):
        alone = sample(table[i : i + 1], rows_of(make_rows, [one], [i]))
        assert (alone.token_ids, alone.states.get(0)) == (
            [together.token_ids[i]],
            together.states.get(i),
        )


def test_mirostat_sees_the_distribution_that_tokens_are_drawn_from(make_rows, make_logits):
    """It works last: of two equal tokens that the cutoff leaves, each surprises by one bit."""
    logits = make_logits(1, vocab=8) * 0 - 8
    logits[0, 2:4] = 4.0
    fields = {"epsilon_cutoff": 0.2, "mirostat_tau": 5.0, "mirostat_eta": 1.0}
    assert sample(logits, make_rows(fields)).states[0]["mirostat"]["mu"] == pytest.approx(
        10 - (1 - 5)
    )
