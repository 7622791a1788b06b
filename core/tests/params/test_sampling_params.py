"""Every parameter's bounds."""

from __future__ import annotations

import msgspec
import pytest
from llm_toolkit.errors import RequestError
from llm_toolkit.params import SamplingParams

BAD = {
    "typical_p": [0, 1.1, "1", None, float("nan")],
    "xtc_probability": [-0.1, 1.1, True],
    "xtc_threshold": [-0.1, 2],
    "mirostat_tau": [0, -1, 101, float("inf"), "3"],
    "mirostat_eta": [-0.1, 1.5, None],
    "repetition_penalty": [0, -1, 1001, None],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, 10**400],
    "dry_multiplier": [-1, 1001],
    "dry_base": [0.5, 101],
    "dry_allowed_length": [0, 1.5, None, 2**64],
    "dry_sequence_breakers": ["\n", [""], [-1], [1.5], [True], ["a" * 257], ["a"] * 301, {"a": 1}],
    "bad_words": ["word", [""], [" "], [5], ["a" * 257], ["a"] * 301],
    "logit_bias": [[1], {-1: 1.0}, {"5": 1.0}, {5: 101}, {5: float("nan")}, {5: "1"}, {True: 1.0}, dict.fromkeys(range(301), 1.0)],
    "allowed_token_ids": [[], [-1], [1.0], "1", [2**31], {1: 2}],
    "prompt_logprobs": [-1, 1.5, True, 2**64],
    "logits_processors": [["a"], {"a": 1}, {1: {}}, {str(i): {} for i in range(17)}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_value_out_of_range_names_its_parameter(name, value):
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})
    assert error.value.param == name and len(str(error.value)) < 300


def test_it_crosses_a_process_boundary():
    params = SamplingParams(
        logit_bias={5: -100, 7: 1.5},
        bad_words=["a"],
        dry_sequence_breakers=["\n", 3],
        allowed_token_ids=[1],
        mirostat_tau=5,
        logits_processors={"no_repeat_ngram": {"size": 3}},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
