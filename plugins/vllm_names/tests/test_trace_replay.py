"""Requests whose output tokens are given, with the model's log probabilities of them."""

from __future__ import annotations

import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_vllm import LLM, SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def drafting():
    """An engine that drafts, too."""
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with LLM("tiny", speculative_config=config) as made:
        yield made


def expected(llm, trace: list[int]) -> list[float]:
    """Log probabilities of the same tokens in a prompt."""
    ids = llm.get_tokenizer().encode(PROMPT) + trace
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = llm.generate({"prompt_token_ids": ids}, params)
    known = output.prompt_logprobs[-len(trace) :]
    return [entry[token].logprob for entry, token in zip(known, trace, strict=True)]


@pytest.mark.parametrize("name", ["llm", "drafting"])
def test_log_probabilities_are_those_of_a_prompt(request, name):
    llm = request.getfixturevalue(name)
    # An end of the sequence (3) among them ends nothing.
    traces = [[300, 17, 3, 3, 45, 265, 1000, 9] * 3, [5], list(range(100, 120))]
    given = [SamplingParams(trace_decode_token_ids=trace, logprobs=2) for trace in traces]
    outputs = llm.generate([PROMPT] * 3, given)
    for output, trace in zip(outputs, traces, strict=True):
        result = output.outputs[0]
        assert list(result.token_ids) == trace and result.finish_reason == "length"
        found = [entry[token].logprob for entry, token in zip(result.logprobs, trace, strict=True)]
        assert found == pytest.approx(expected(llm, trace), abs=1e-4)


def test_more_tokens_than_the_trace_are_an_error(llm):
    extra_args = {"trace_decode_token_ids": [5, 6]}
    [output] = llm.generate([PROMPT], SamplingParams(extra_args=extra_args, max_tokens=3))
    assert "trace_decode_token_ids with 2 tokens" in str(output.error)
    [output] = llm.generate([PROMPT], SamplingParams(extra_args=extra_args, max_tokens=2))
    assert list(output.outputs[0].token_ids) == [5, 6] and output.error is None


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"trace_decode_token_ids": []}, "trace_decode_token_ids"),
    ],
)
def test_parameters_that_do_not_go_together(options, param):
    with pytest.raises(RequestError) as told:
        SamplingParams(**{"trace_decode_token_ids": [5], **options})
    assert told.value.param == param


def test_tokens_out_of_the_vocabulary(llm):
    with pytest.raises(RequestError, match="token ids of the vocabulary"):
        llm.generate([PROMPT], SamplingParams(trace_decode_token_ids=[2**20]))
