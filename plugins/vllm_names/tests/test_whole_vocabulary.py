"""Log probabilities of the whole vocabulary (-1), and functions of the model."""

from __future__ import annotations

import math

import pytest
from toolkit_lm.errors import RequestError, UnsupportedError
from toolkit_lm_vllm import LLM, SamplingParams

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", max_logprobs=-1) as made:
        yield made


def test_log_probabilities_of_all_tokens(llm):
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2, temperature=0)
    [output] = llm.generate(PROMPT, params)
    size = llm.model_config.get_vocab_size()
    for entry in [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]:
        assert len(entry) == size
        assert math.fsum(math.exp(found.logprob) for found in entry.values()) == pytest.approx(1)
        assert sorted(found.rank for found in entry.values())[0] == 1


def test_they_are_bounded_by_max_logprobs():
    with LLM("tiny") as made, pytest.raises(RequestError, match="max_logprobs") as told:
        made.generate(PROMPT, SamplingParams(logprobs=-1))
    assert told.value.param == "logprobs"


def test_a_prompt_alone(llm):
    [output] = llm.generate(PROMPT, SamplingParams(prompt_logprobs=0, max_tokens=0))
    assert list(output.outputs[0].token_ids) == []
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_function_of_the_model(llm):
    [names] = llm.apply_model(lambda model: [name for name, _ in model.named_modules()])
    assert "model.layers.0.self_attn" in names


def test_a_model_of_another_process():
    with (
        LLM("tiny", engine_process=True) as made,
        pytest.raises(UnsupportedError, match="collective_rpc"),
    ):
        made.apply_model(len)
