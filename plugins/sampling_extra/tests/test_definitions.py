"""DRY, XTC and Mirostat against their definitions in plain Python, the others against those of
transformers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.renderer import Rendered
from toolkit_lm.sampling import sample, uniform
from toolkit_lm_sampling_extra.params import DryParams
from toolkit_lm_sampling_extra.xtc import STREAM

VOCAB = 13
LENGTHS = [1, 2, 5, 12, 30, 90]


@pytest.fixture(scope="module")
def sequences():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(0, VOCAB, (n,), generator=generator).tolist() for n in LENGTHS]


def dry_by_definition(tokens, logits, p, breakers):
    """The author's loop."""
    scores = logits.numpy().copy()
    last = tokens[-1]
    if last in breakers:
        return scores
    longest = {}
    for i in range(len(tokens) - 1):
        following = tokens[i + 1]
        if tokens[i] != last or following in breakers:
            continue
        length = 1
        while (
            length < 50
            and i - length >= 0
            and tokens[i - length] == tokens[-1 - length]
            and tokens[i - length] not in breakers
        ):
            length += 1
        longest[following] = max(length, longest.get(following, 0))
    for token, length in longest.items():
        if length >= p["dry_allowed_length"]:
            scores[token] -= p["dry_multiplier"] * p["dry_base"] ** (
                length - p["dry_allowed_length"]
            )
    return scores


@pytest.mark.parametrize("allowed_length", [1, 2, 4])
@pytest.mark.parametrize("breakers", [[], [3], [0, 1, 11]])
def test_dry_is_its_definition(make_rows, make_logits, edited, sequences, allowed_length, breakers):
    tokens = [*sequences, [1, 2, 3, 4] * 40, [5] * 200, [1, 2, 3, 4, 3, 4, 1, 2, 3, 4]]
    fields = {
        "dry_multiplier": 0.8,
        "dry_base": 1.1,
        "dry_allowed_length": allowed_length,
        "dry_sequence_breakers": breakers,
    }
    logits = make_logits(len(tokens), vocab=VOCAB)
    rows = make_rows(
        *[fields] * len(tokens), prompts=[t[:1] for t in tokens], outputs=[t[1:] for t in tokens]
    )
    ours = edited(logits, rows)
    assert not torch.equal(ours, logits)
    for row, line, before in zip(ours, tokens, logits, strict=True):
        assert np.allclose(
            row.numpy(), dry_by_definition(line, before, fields, breakers), rtol=1e-5, atol=1e-5
        )


def test_a_huge_dry_penalty_rules_the_token_out(make_rows, make_logits):
    fields = {"temperature": 0, "dry_multiplier": 1000, "dry_base": 100, "dry_allowed_length": 1}
    sampled = sample(
        make_logits(1) * 0 + torch.eye(64)[5] * 1e4, make_rows(fields, outputs=[[5] * 100])
    )
    assert sampled.token_ids != [5] and not sampled.errors


def test_an_allowed_length_beyond_all_repetitions(make_rows, make_logits, edited):
    logits = make_logits(1)
    rows = make_rows({"dry_multiplier": 1, "dry_allowed_length": 2**63 - 1}, outputs=[[5] * 100])
    assert torch.equal(edited(logits, rows), logits)


def test_xtc_excludes_top_choices(make_rows, make_logits, filtered):
    rows = 400
    probs = torch.softmax(make_logits(1)[0], dim=-1)
    top = np.flatnonzero(probs.numpy() >= 0.05)
    kept = np.ones(len(probs), bool)
    kept[top[np.argsort(-probs.numpy()[top])[:-1]]] = False
    assert len(top) >= 2
    applied = uniform(np.arange(rows, dtype=np.uint64), np.zeros(rows, np.int64), STREAM) < 0.4
    assert 0.3 < applied.mean() < 0.5
    ours = filtered(
        probs.expand(rows, -1), make_rows(*[{"xtc_probability": 0.4, "xtc_threshold": 0.05}] * rows)
    ).numpy()
    for row, excluded in zip(ours, applied, strict=True):
        expected = probs.numpy() * (kept if excluded else 1)
        assert np.allclose(row, expected / expected.sum(), atol=1e-6)


def test_xtc_leaves_a_single_top_choice(make_rows, filtered):
    probs = torch.softmax(torch.tensor([[5.0, 1.0, 1.0]]), dim=-1)
    assert torch.allclose(
        filtered(probs, make_rows({"xtc_probability": 1, "xtc_threshold": 0.3})), probs
    )


def test_mirostat_is_its_definition(make_rows, make_logits):
    """Version 2 as Basu et al. state it: keep tokens of at most mu bits, draw, and move mu by the
    surprise of the draw."""
    state = {}
    surprises = []
    for position in range(300):
        logits = make_logits(1, seed=position, vocab=200) * 3
        rows = make_rows(
            {"mirostat_tau": 3.0, "mirostat_eta": 0.3}, outputs=[[0] * position], states=[state]
        )
        before = state["mirostat"]["mu"] if state else 6.0
        probs = torch.softmax(logits[0].double(), dim=-1).numpy()
        kept = -np.log2(probs) <= before
        kept[probs.argmax()] = True
        left = np.where(kept, probs, 0) / probs[kept].sum()
        sampled = sample(logits, rows)
        [token] = sampled.token_ids
        state = sampled.states[0]
        assert left[token] > 0
        surprises.append(-math.log2(left[token]))
        assert state["mirostat"]["mu"] == pytest.approx(
            before - 0.3 * (surprises[-1] - 3.0), abs=1e-4
        )
    assert np.mean(surprises) == pytest.approx(3.0, abs=0.25)


def test_greedy_rows_do_not_use_filters(make_rows, make_logits):
    table = make_logits(4)
    fields = [
        {"temperature": 0, **p}
        for p in (
            {"xtc_probability": 1},
            {"mirostat_tau": 1.0},
            {"epsilon_cutoff": 0.5},
            {"typical_p": 0.01},
        )
    ]
    sampled = sample(table, make_rows(*fields))
    assert sampled.token_ids == table.argmax(-1).tolist() and sampled.states == {}


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_no_repeat_ngram_is_that_of_transformers(make_rows, make_logits, edited, sequences, size):
    from transformers import NoRepeatNGramLogitsProcessor

    logits = make_logits(len(LENGTHS), vocab=VOCAB) * 3
    rows = make_rows(
        *[{"no_repeat_ngram_size": size}] * len(LENGTHS),
        prompts=[s[:1] for s in sequences],
        outputs=[s[1:] for s in sequences],
    )
    for tokens, before, row in zip(sequences, logits, edited(logits, rows), strict=True):
        assert torch.equal(
            row, NoRepeatNGramLogitsProcessor(size)(torch.tensor([tokens]), before[None].clone())[0]
        )


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("EpsilonLogitsWarper", "epsilon_cutoff", 0.01),
        ("EpsilonLogitsWarper", "epsilon_cutoff", 0.2),
        ("EpsilonLogitsWarper", "epsilon_cutoff", 0.9),
        ("TypicalLogitsWarper", "typical_p", 0.3),
        ("TypicalLogitsWarper", "typical_p", 0.9),
    ],
)
@pytest.mark.parametrize("scale", [2, 3])
def test_filters_are_those_of_transformers(
    make_rows, make_logits, filtered, name, field, value, scale
):
    import transformers

    logits = make_logits(6) * scale
    theirs = torch.softmax(getattr(transformers, name)(value)(None, logits.clone()), dim=-1)
    ours = filtered(torch.softmax(logits, dim=-1), make_rows(*[{field: value}] * 6))
    assert ((ours > 0) == (theirs > 0)).all()
    assert torch.allclose(ours, theirs, atol=1e-6)


# Parameters

BAD = {
    "xtc_probability": [-0.1, 1.1, True],
    "xtc_threshold": [-0.1, 2],
    "mirostat": [-1, 1, 3, 2.5, "2"],
    "mirostat_tau": [0, -1, 101, float("inf"), "3"],
    "mirostat_eta": [-0.1, 1.5],
    "dry_multiplier": [-1, 1001],
    "dry_base": [0.5, 101],
    "dry_allowed_length": [0, 1.5, 2**64],
    "dry_sequence_breakers": [
        "\n",
        [""],
        [" "],
        [-1],
        [1.5],
        [True],
        ["a" * 257],
        ["a"] * 301,
        {"a": 1},
    ],
    "no_repeat_ngram_size": [-1, 2**31, 1.5],
    "epsilon_cutoff": [-0.1, 1.1, "1"],
    "typical_p": [0, 1.1, "1", float("nan")],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_value_out_of_range_names_its_parameter(prepare, name, value):
    with pytest.raises(RequestError, match=name) as error:
        prepare(**{name: value})
    assert error.value.param == name and len(str(error.value)) < 300


def test_every_parameter_is_known(registry):
    assert set(registry.params) == set(BAD)


@pytest.mark.parametrize(
    "fields",
    [
        {"xtc_probability": 0, "xtc_threshold": 0.5},
        {"mirostat_tau": None, "mirostat_eta": 0.5},
        {"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1},
        {"dry_multiplier": 0, "dry_sequence_breakers": ["a"]},
        {"no_repeat_ngram_size": 0, "epsilon_cutoff": 0, "typical_p": 1},
    ],
)
def test_values_that_mean_off(prepare, fields):
    assert prepare(**fields) == {}


def test_mirostat_as_llama_cpp_turns_it_on(prepare):
    assert prepare(mirostat=2) == prepare(mirostat_tau=5.0)
    assert prepare(mirostat=2, mirostat_tau=3.0) == prepare(mirostat_tau=3.0)


def test_every_token_that_has_a_breaker_breaks():
    class Words:
        vocab_size = 9
        config = VllmConfig.default({"vocab_size": 9})
        texts = (b"\xff", b".\n", b"\n", b"\n\n", b"a", b"", b'":', b"\xe2\x80", b"::a")

        def render_prompt(self, text, *, add_special_tokens):
            return Rendered([2 if text.endswith("\n") else 8])

        def token_bytes(self, token_ids, *, skip_special_tokens=False):
            return [self.texts[one] for one in token_ids]

    renderer = Words()
    for given, expected in (
        (["\n"], [1, 2, 3]),
        ([":", 4], [4, 6, 8]),
        (["\n", "\n\n"], [1, 2, 3]),
        ([], []),
    ):
        prepared = DryParams(dry_multiplier=1, dry_sequence_breakers=given).prepare(renderer)
        assert prepared["breakers"] == expected


def test_too_many_tokens_that_break_are_refused(prepare, monkeypatch):
    monkeypatch.setattr("toolkit_lm_sampling_extra.params._MOST_BREAKERS", 1)
    with pytest.raises(
        RequestError, match="more than 1 tokens have one of these texts: give longer ones"
    ):
        prepare(dry_multiplier=1, dry_sequence_breakers=["a", "b"])


def test_dry_breakers_are_texts_or_ids(prepare):
    def breakers(given):
        return prepare(dry_multiplier=1, dry_sequence_breakers=given)["dry"]["breakers"]

    assert breakers(["b", "ab"]) == [ord("b")] and breakers([17]) == [17] and breakers([]) == []
    assert breakers(None) == sorted(map(ord, '\n:"*'))
    with pytest.raises(
        RequestError, match="token id 128 is not in the vocabulary, which has the ids from 0 to 127"
    ) as error:
        breakers(["a", 128])
    assert error.value.param == "dry_sequence_breakers"


def test_none_stands_for_the_default(prepare):
    assert (
        prepare(mirostat_tau=3, mirostat_eta=None)
        == prepare(mirostat_tau=3)
        != prepare(mirostat_tau=4)
    )
