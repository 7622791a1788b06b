"""Masks and penalties, against transformers where it has them, else against their definitions in
plain Python."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from toolkit_lm.params import SamplingParams
from toolkit_lm.sampling import sample
from toolkit_lm.sampling.bad_words import BadWords
from toolkit_lm.sampling.masks import mask
from toolkit_lm.sampling.penalties import penalize

VOCAB = 13
LENGTHS = [1, 2, 5, 12, 30, 90]


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def edited(step, logits, rows):
    changed = logits.clone()
    step(changed, rows)
    return changed


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_is_that_of_transformers(make_rows, make_logits, sequences, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = make_logits(len(LENGTHS), vocab=VOCAB)
    rows = make_rows(
        *[SamplingParams(repetition_penalty=penalty)] * len(LENGTHS),
        prompts=[s[:1] for s in sequences],
        outputs=[s[1:] for s in sequences],
    )
    ours = edited(penalize, logits, rows)
    for i, tokens in enumerate(sequences):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([tokens]), logits[i : i + 1].clone()
        )
        assert torch.equal(ours[i], theirs[0])


def test_presence_and_frequency_penalties_count_the_output_only(make_rows, make_logits, sequences):
    params = [
        SamplingParams(presence_penalty=0.7),
        SamplingParams(frequency_penalty=-0.3),
        SamplingParams(),
    ] * 2
    logits = make_logits(len(LENGTHS), vocab=VOCAB)
    ours = edited(
        penalize, logits, make_rows(*params, prompts=[[3, 3, 4]] * len(LENGTHS), outputs=sequences)
    )
    for row, p, tokens, before in zip(ours, params, sequences, logits, strict=True):
        counts = np.bincount(tokens, minlength=VOCAB)
        expected = before.numpy() - p.presence_penalty * (counts > 0) - p.frequency_penalty * counts
        assert np.allclose(row.numpy(), expected, atol=1e-6)


def test_bad_words_are_those_of_transformers(make_rows, make_logits, sequences):
    from transformers import NoBadWordsLogitsProcessor

    words = (
        [[3], [5, 6], [1, 2, 3]]
        + [[a, b, c] for a in range(VOCAB) for b in range(VOCAB) for c in (7, 8)]
        + [[4] * 20]
    )
    logits = make_logits(len(LENGTHS), vocab=VOCAB)
    rows = make_rows(
        *[SamplingParams()] * len(LENGTHS), outputs=sequences, bad_words=[words] * len(LENGTHS)
    )
    ours = edited(mask, logits, rows)
    assert 1 < (ours[-1] == -torch.inf).sum() < VOCAB
    for i, tokens in enumerate(sequences):
        # A token that no word has, since transformers 5.16 passes over a word as long as all
        # tokens.
        theirs = NoBadWordsLogitsProcessor(bad_words_ids=words, eos_token_id=[])(
            torch.tensor([[VOCAB, *tokens]]), logits[i : i + 1].clone()
        )
        assert torch.equal(ours[i], theirs[0])


def test_only_words_that_could_be_complete_are_compared():
    class Word(list):
        num_read = 0

        def __getitem__(self, index):
            Word.num_read += isinstance(index, slice)
            return super().__getitem__(index)

    words = BadWords([Word([1] * 200 + [number, 5]) for number in range(300)])
    assert words.forbidden(np.array([1] * 250 + [7], np.int32)).tolist() == [5]
    assert words.forbidden(np.array([7], np.int32)).tolist() == []
    assert Word.num_read == 2


def test_bad_words_do_not_begin_in_the_prompt(make_rows, make_logits):
    words = [[[5, 6, 7]]] * 3
    rows = make_rows(
        *[SamplingParams()] * 3,
        prompts=[[5, 6], [5], [1]],
        outputs=[[], [6], [5, 6]],
        bad_words=words,
    )
    banned = edited(mask, make_logits(3, vocab=VOCAB), rows) == -torch.inf
    assert banned.nonzero().tolist() == [[2, 7]]


def test_bias_allowed_and_min_tokens(make_rows, make_logits):
    logits = make_logits(4, vocab=VOCAB)
    params = [
        SamplingParams(logit_bias={2: 1.5, 9: -100.0}),
        SamplingParams(allowed_token_ids=[4, 7], logit_bias={7: 2.0, 1: 3.0}),
        SamplingParams(min_tokens=1),
        SamplingParams(),
    ]
    ours = edited(mask, logits, make_rows(*params, stops=[[5, 10**6]] * 4))
    expected = logits.clone()
    expected[0, 2] += 1.5
    expected[0, 9] -= 100
    expected[1] = -torch.inf
    expected[1, 4] = logits[1, 4]
    expected[1, 7] = logits[1, 7] + 2
    expected[2, 5] = -torch.inf
    assert torch.equal(ours, expected)


def test_parameters_that_leave_no_token_fail_alone(make_rows, make_logits):
    params = [
        SamplingParams(allowed_token_ids=[3]),
        SamplingParams(),
        SamplingParams(allowed_token_ids=[3], temperature=0),
    ]
    sampled = sample(make_logits(3), make_rows(*params, bad_words=[[[3]], [], [[3]]]))
    assert set(sampled.errors) == {0, 2} and "leave no token" in sampled.errors[0]


def test_sequences_of_a_request_share_their_rules(make_rows):
    """Until the last of them has left."""
    params = SamplingParams(n=3, allowed_token_ids=[3, 4])
    rows = make_rows(params, params, params, SamplingParams(allowed_token_ids=[3, 4]))
    first, second, third, other = rows.rules
    assert first is second is third is not other
    kept = weakref.ref(first)
    del first, second, third, other
    for row in range(3):
        assert kept() is not None
        rows.clear(row)
    assert kept() is None


def test_same_parameters_with_other_words_share_nothing(make_rows, make_logits):
    rows = make_rows(
        *[SamplingParams(min_tokens=1)] * 2, bad_words=[[[5]], [[6]]], stops=[[7], [8]]
    )
    banned = edited(mask, make_logits(2, vocab=VOCAB), rows) == -torch.inf
    assert banned.nonzero().tolist() == [[0, 5], [0, 7], [1, 6], [1, 8]]
