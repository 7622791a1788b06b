"""Every parameter's bounds."""

from __future__ import annotations

import msgspec
import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams

BAD = {
    "top_p": [0, 1.1, "1", float("nan")],
    "repetition_penalty": [0, 5e-324, -1, 1001],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, 10**400],
    "bad_words": ["word", [""], [" "], [5], ["a" * 257], ["a"] * 301],
    "logit_bias": [
        [1],
        {-1: 1.0},
        {"5": 1.0},
        {5: 101},
        {5: float("nan")},
        {5: "1"},
        {True: 1.0},
        dict.fromkeys(range(301), 1.0),
    ],
    "allowed_token_ids": [[], [3, 4, 3], [-1], [1.0], "1", [2**31], {1: 2}],
    "prompt_logprobs": [-1, 1.5, True, 2**64],
    "extra_args": [["a"], {1: {}}, {str(i): 1 for i in range(65)}],
    "best_of": [0, 1.5, True, "2"],
    "use_beam_search": [1, "true"],
    # These mean nothing without a search, whatever their value.
    "beam_width": [1, 4, 1.5, True],
    "length_penalty": [10.5, -11, 2.0, float("nan")],
    "early_stopping": [1, "always", "never", True],
}
DRAWS = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {5: 1.0},
    "extra_args": {"no_repeat_ngram_size": 3},
    "seed": 0,
    "stop": "a",
    "logprobs": 0,
    "prompt_logprobs": 0,
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_value_out_of_range_names_its_parameter(name, value):
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name and len(str(error.value)) < 300


@pytest.mark.parametrize("name", DRAWS)
def test_a_beam_search_refuses_what_says_how_to_draw(name):
    assert SamplingParams(**{name: DRAWS[name]})
    with pytest.raises(RequestError, match=f"{name} has no effect with use_beam_search") as error:
        SamplingParams(use_beam_search=True, n=2, **{name: DRAWS[name]})
    assert error.value.param == name


def test_a_beam_search_takes_what_is_off():
    params = SamplingParams(
        use_beam_search=True,
        n=2,
        temperature=0,
        top_k=-1,
        top_p=1.0,
        stop=[],
        logit_bias={},
        presence_penalty=0,
    )
    assert params.use_beam_search and params.widest[1] == 2


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"n": 3, "best_of": 2}, "best_of", r"at least n \(3\)"),
        ({"use_beam_search": True}, "beam_width", "at least 2"),
        ({"use_beam_search": True, "beam_width": 1}, "beam_width", "at least 2"),
        ({"use_beam_search": True, "n": 3, "beam_width": 2}, "beam_width", r"at least n \(3\)"),
        (
            {"use_beam_search": True, "best_of": 3, "beam_width": 4},
            "best_of",
            r"unset, or beam_width \(4\)",
        ),
    ],
)
def test_widths_that_contradict_one_another(fields, param, message):
    with pytest.raises(RequestError, match=message) as error:
        SamplingParams(**fields)
    assert error.value.param == param


def test_how_many_sequences_are_computed_and_given():
    def numbers(**fields):
        params = SamplingParams(**fields)
        return params.num_sequences, params.num_outputs, params.ranks

    assert numbers(n=2) == numbers(n=2, best_of=2) == (2, 2, False)
    assert numbers(n=2, best_of=5) == (5, 5, True)
    assert (
        numbers(n=2, best_of=5, use_beam_search=True)
        == numbers(n=2, beam_width=5, use_beam_search=True)
        == (5, 2, True)
    )
    assert numbers(n=2, use_beam_search=True) == (2, 2, True)


def test_it_crosses_a_process_boundary():
    params = SamplingParams(
        logit_bias={5: -100, 7: 1.5},
        bad_words=["a"],
        allowed_token_ids=[1],
        extra_args={"dry_sequence_breakers": ["\n", 3], "mirostat_tau": 5.0},
        best_of=3,
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    params = SamplingParams(n=2, use_beam_search=True, early_stopping="never", length_penalty=-1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_none_stands_for_a_default():
    asked = SamplingParams(**dict.fromkeys(SAMPLING_PARAMS))
    assert asked == SamplingParams(max_tokens=None)


def test_they_can_be_changed_and_are_checked():
    params = SamplingParams()
    params.temperature = 0.5
    params.max_tokens = 7
    assert params == SamplingParams(temperature=0.5, max_tokens=7)
    params.temperature = None
    with pytest.raises(RequestError, match="top_p must be above 0 and at most 1") as error:
        params.top_p = 2
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens"):
        params.min_tokens = 8
    assert error.value.param == "top_p" and params == SamplingParams(max_tokens=7)
