"""Output that another server has begun: the same tokens, in few steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import RequestError
from toolkit_lm_router.begun import Begun

PROMPT = "Once upon a time"
NUM_TOKENS = 200


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("tiny", kernels="cpu", attention_backend="cpu", engine_process=False) as made:
        yield made


def output(llm: LLM, begun: list[int] | None = None, **options: Any) -> Any:
    extra = options.pop("extra_args", {}) | ({} if begun is None else {"begun_token_ids": begun})
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, extra_args=extra or None, **options
    )
    return llm.generate(PROMPT, params)[0].outputs[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.9, "seed": 5, "logprobs": 2},
        {"temperature": 1.0, "seed": 6, "presence_penalty": 1.0, "frequency_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "min_tokens": 190, "stop": ["e"]},
        {"temperature": 1.0, "seed": 8, "extra_args": {"mirostat": 2}},
        {"temperature": 1.0, "seed": 9, "extra_args": {"xtc_probability": 0.5}},
    ],
)
@pytest.mark.parametrize("share", [0.01, 0.7, 1.0])
def test_what_is_begun_goes_on_as_it_would_have(llm, options, share):
    whole = output(llm, **options)
    known = [*whole.token_ids][: int(len(whole.token_ids) * share)]
    again = output(llm, known, **options)
    assert [*again.token_ids] == [*whole.token_ids]
    assert (again.text, again.finish_reason) == (whole.text, whole.finish_reason)
    assert again.logprobs == whole.logprobs


def test_few_steps_draw_what_is_known(llm, monkeypatch):
    steps = 0
    real = Begun.drafts

    def counted(self: Begun, row: Any) -> list[int]:
        nonlocal steps
        steps += 1
        return real(self, row)

    monkeypatch.setattr(Begun, "drafts", counted)
    whole = output(llm, temperature=0)
    assert steps == 0
    output(llm, [*whole.token_ids], temperature=0)
    assert 1 < steps < 10


def test_other_tokens_are_of_no_use(llm):
    whole = [*output(llm, temperature=0.9, seed=5).token_ids]
    other = [whole[0] ^ 1, *whole[1:]]
    assert [*output(llm, other, temperature=0.9, seed=5).token_ids] == whole


def test_tokens_outside_of_the_vocabulary_are_refused(llm):
    for wrong in ([-1], [2**30]):
        with pytest.raises(RequestError, match="begun_token_ids"):
            output(llm, wrong)
