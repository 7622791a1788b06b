"""Prompt lookup: the index, and its drafts."""

from __future__ import annotations

import numpy as np
import pytest
from toolkit_lm import LLM
from toolkit_lm.errors import ConfigError
from toolkit_lm_drafters.ngram import NgramDrafter
from toolkit_lm_drafters.options import Options
from toolkit_lm_drafters.token_index import TokenIndex


def expected(tokens: list[int], size: int) -> list[int]:
    """Ends of the grams that equal the last `size` tokens, the latest first."""
    end = len(tokens)
    return [
        place
        for place in range(end - 1, size - 1, -1)
        if tokens[place - size : place] == tokens[-size:]
    ]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("chunk", [1, 3, 40, 700])
def test_the_index_finds_all_occurrences(size, chunk):
    """However many tokens come at a time, and beyond its capacity."""
    tokens = np.random.default_rng(size).integers(0, 4, 700).astype(np.int32)
    index = TokenIndex(size, 8)
    for end in range(chunk, len(tokens) + 1, chunk):
        index.update(tokens[:end])
        found = list(index.occurrences(memoryview(tokens), end, 10**6))
        assert found == expected(tokens[:end].tolist(), size)


def draft(tokens: list[int], **options) -> list[int]:
    drafter = NgramDrafter(None, None, None, plugins=None, options=Options(**options))
    return drafter.propose(np.array(tokens, np.int32))


def test_the_longest_match_counts_and_then_the_latest():
    assert draft([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], num_speculative_tokens=1) == [9]
    assert draft([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], num_speculative_tokens=1) == [8]
    assert draft([1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3], prompt_lookup_max=2)[0] == 8


def suffix_at(tokens: list[int], place: int, most: int) -> int:
    """Equal tokens before `place` and before the end, at most `most`."""
    length = 0
    while length < min(most, place) and tokens[place - length - 1] == tokens[-length - 1]:
        length += 1
    return length


@pytest.mark.parametrize("most", [2, 5, 16])
def test_drafts_follow_the_best_of_all_places(most):
    draws = np.random.default_rng(most)
    drafted = 0
    for length in range(2, 100):
        tokens = np.resize(draws.integers(0, 3, length), draws.integers(length, 120)).tolist()
        lengths = {place: suffix_at(tokens, place, most) for place in range(len(tokens))}
        best = max(lengths, key=lambda place: (lengths[place], place))
        expected = tokens[best : best + 1] if lengths[best] >= 2 else []
        assert draft(tokens, num_speculative_tokens=1, prompt_lookup_max=most) == expected
        drafted += len(expected)
    assert drafted > 50


def test_a_match_yields_as_many_drafts_as_it_has_tokens():
    """Up to what is asked for. The longest match that is looked up may be longer."""
    assert draft([1, 2, 3, 4, 5, 6, 9, 2, 3]) == [4, 5]
    assert draft([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]) == [5, 6, 9]
    repeated = np.resize([4, 5, 6, 9, 2, 3], 16).tolist()
    assert draft([1, 2, 3, 4, 5, 6, 9, 2, 3], prompt_lookup_max=2) == repeated
    assert draft([1, 2, 3] * 9) == np.resize([1, 2, 3], 16).tolist()
    assert draft([1, 2, 3] * 9, num_speculative_tokens=3) == [1, 2, 3]


def test_shorter_n_grams_than_the_least_are_not_looked_up():
    assert draft([1, 2, 3, 4, 5, 2]) == []
    assert draft([1, 2, 3, 4, 5, 2], prompt_lookup_min=1)[0] == 3
    assert draft([7]) == []


def test_a_repetition_goes_on():
    given = {"num_speculative_tokens": 5, "prompt_lookup_max": 2}
    assert draft([1, 2, 3, 2, 3], **given) == [2, 3, 2, 3, 2]


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (2, 16)), ({"prompt_lookup_max": 1}, (1, 1)), ({"prompt_lookup_min": 17}, (17, 17))],
)
def test_bounds_that_are_not_given_follow(options, expected):
    assert Options(**options).lookup == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("prompt_lookup_min=0", "prompt_lookup_min.*>= 1"),
        ("num_speculative_tokens=0", "num_speculative_tokens.*>= 1"),
        ("prompt_lookup=3", "Did you mean 'prompt_lookup_m"),
    ],
)
def test_wrong_options(option, message):
    with pytest.raises(ConfigError, match=message):
        LLM("tiny", drafter="ngram", plugin_option=[f"drafters.{option}"])


def test_bounds_that_contradict_each_other():
    options = ["drafters.prompt_lookup_min=4", "drafters.prompt_lookup_max=3"]
    with pytest.raises(ConfigError, match=r"prompt_lookup_min \(4\) is more than"):
        LLM("tiny", drafter="ngram", plugin_option=options)
