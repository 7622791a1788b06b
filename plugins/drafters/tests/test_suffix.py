"""Suffix decoding: guesses by votes, and the outputs that requests share."""

from __future__ import annotations

import numpy as np
import pytest
from toolkit_lm_devkit import DrafterConformance
from toolkit_lm_drafters.corpus import END, Corpus, Limits
from toolkit_lm_drafters.options import Options
from toolkit_lm_drafters.shared_outputs import SharedOutputs
from toolkit_lm_drafters.suffix import SuffixDrafter

LIMITS = Limits(num_tokens=16, depth=24, factor=1.0, min_probability=0.1)


class TestSuffix(DrafterConformance):
    drafter = "suffix"


def guess(held, known, limits=LIMITS, sizes=(2, 4)):
    held, known = np.array(held, np.int32), np.array(known, np.int32)
    corpus = Corpus(sizes)
    corpus.update(held)
    return corpus.guess(held.data, len(held), known.data, limits)


def test_a_guess_is_as_long_as_its_match():
    text = list(range(10, 40))
    assert guess(text, [1, 14, 15]).tokens == [16, 17]
    assert guess(text, text[:5]).tokens == text[5:10]
    assert guess(text, text[:5], LIMITS._replace(factor=2.0)).tokens == text[5:15]
    assert guess(text, text[:20]).tokens == text[20:30], "the text ends"
    assert guess(text, [1, 14]).tokens == []


def test_the_longest_match_counts_wherever_it_is():
    """Of matches that are equally long, the majority says what follows."""
    text = [7, 1, 2, 3, 4, 50, 8, 3, 4, 60, 3, 4, 61, 3, 4, 60, 9]
    assert guess(text, [7, 1, 2, 3, 4]).tokens[0] == 50
    found = guess(text, [0, 3, 4])
    assert found.tokens[0] == 60 and found.probabilities[0] < 0.5


def test_an_unlikely_guess_ends():
    text = [token for last in range(8) for token in (1, 2, 90 + last)]
    assert guess(text, [5, 1, 2]).tokens != []
    assert guess(text, [5, 1, 2], LIMITS._replace(min_probability=0.2)).tokens == []


def test_no_guess_reaches_into_the_next_output():
    assert guess([1, 2, 3, END, 4, 5, 6], [1, 2]).tokens == [3]
    assert guess([1, 2, 3, END, 4, 5, 6], [2, 3]).tokens == []


def outputs(rng, count, length):
    return [rng.integers(0, 1000, length).astype(np.int32) for _ in range(count)]


def ask(shared, name, output):
    return shared.guess(name, output[:20].data, LIMITS).tokens


def test_scopes_see_their_own_outputs_only():
    shared = SharedOutputs(2**20)
    one, two = outputs(np.random.default_rng(0), 2, 40)
    shared.add("one", one)
    shared.add("two", two)
    assert ask(shared, "one", one) == one[20:36].tolist()
    assert ask(shared, "two", two) == two[20:36].tolist()
    assert ask(shared, "one", two) == ask(shared, "two", one) == ask(shared, "", one) == []


def test_the_bytes_are_limited():
    """The least recently used scope goes first; one scope alone forgets its older outputs."""
    limit = 2**17
    shared = SharedOutputs(limit)
    rng = np.random.default_rng(1)
    old, kept = outputs(rng, 2, 500)
    shared.add("old", old)
    shared.add("kept", kept)
    for count, output in enumerate(outputs(rng, 60, 300)):
        assert ask(shared, "kept", kept), f"forgotten after {count} outputs, although it is in use"
        shared.add(f"tenant {count % 4}", output)
        assert shared.num_bytes <= limit
        assert ask(shared, f"tenant {count % 4}", output)
    assert not ask(shared, "old", old)
    shared = SharedOutputs(limit)
    many = outputs(rng, 60, 300)
    for output in many:
        shared.add("", output)
        assert ask(shared, "", output)
        assert shared.num_bytes <= limit
    assert not ask(shared, "", many[0])


@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_outputs_that_do_not_fit_are_left_out(limit):
    shared = SharedOutputs(limit)
    [output] = outputs(np.random.default_rng(2), 1, 2000)
    shared.add("", output)
    assert shared.num_bytes <= limit and not ask(shared, "", output)


def test_nothing_is_drafted_beyond_the_limit():
    drafter = SuffixDrafter(
        None, None, None, plugins=None, options=Options(num_speculative_tokens=3)
    )
    text = np.array([*range(30), *range(20)], np.int32)
    assert drafter.propose(text) == [20, 21, 22]
    drafter.close()
