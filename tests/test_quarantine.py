"""Steps that fail: who is to blame ends with an error, nobody else notices; an engine that computes
nothing any more says why."""

from __future__ import annotations

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import EngineDeadError

OPTIONS = {"num_kv_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
POISON = 271
GOOD = [[20 + i, 30, 40 + i, 50] for i in range(7)]


def ids(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


class Trap:
    """Makes a model's forward pass fail: on POISON, or as often as `times` says."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0.0
        self.failures = 0
        model = llm.engine.client.core.executor.runner.model
        self.forward = model.forward
        monkeypatch.setattr(model, "forward", self)

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if POISON in input_ids or self.times > 0:
            self.times -= 1
            self.failures += 1
            raise FloatingPointError("the trap has sprung")
        return self.forward(input_ids, positions)


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(request, make_llama):
    with LLM(str(make_llama("engine")[0]), overlap=request.param, **OPTIONS) as llm:
        yield llm


@pytest.fixture
def expected(llm):
    """Tokens by prompt, computed alone."""
    return {
        tuple(p): llm.generate(ids([p]), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        for p in GOOD
    }


@pytest.fixture
def trap(llm, expected, monkeypatch):
    return Trap(llm, monkeypatch)


def assert_good(outputs, expected) -> None:
    for output in outputs:
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == expected[tuple(output.prompt_token_ids)]


def test_the_culprit_fails_alone(llm, expected, trap):
    prompts = [*GOOD[:3], [POISON, 5], *GOOD[3:], [6, 7, POISON]]
    outputs = llm.generate(ids(prompts), GREEDY, use_tqdm=False)
    bad = [output for output in outputs if POISON in output.prompt_token_ids]
    assert [o.outputs[0].finish_reason for o in bad] == ["error", "error"]
    assert all("the trap has sprung" in o.error and "FloatingPointError" in o.error for o in bad)
    assert_good([output for output in outputs if output not in bad], expected)
    assert_good(llm.generate(ids(GOOD), GREEDY, use_tqdm=False), expected)
    assert llm.engine.client.core.scheduler.blocks.num_used == 0


def test_one_traceback_tells_of_all_requests_that_fail_in_the_same_place(
    llm, expected, trap, caplog
):
    prompts = [[POISON, 5 + i] for i in range(4)]
    for _ in range(2):
        caplog.clear()
        outputs = llm.generate(ids(prompts), GREEDY, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["error"] * 4
        told = [
            record for record in caplog.records if record.getMessage().startswith("a step failed: ")
        ]
        assert len(told) > 4
        assert [record.exc_info is not None for record in told].count(True) == 1


def test_a_culprit_in_the_middle_of_its_output(llm, expected, trap):
    """It draws the token on which it fails, and keeps what it had."""
    free = llm.generate(ids([[9, 9]]), GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    bias = SamplingParams(
        temperature=0, max_tokens=8, ignore_eos=True, logit_bias={POISON: 100.0}, min_tokens=0
    )
    outputs = llm.generate(ids([GOOD[0], [9, 9], GOOD[1]]), [GREEDY, bias, GREEDY], use_tqdm=False)
    assert free[0] != POISON
    assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].token_ids) == (
        "error",
        [POISON],
    )
    assert_good([outputs[0], outputs[2]], expected)


def test_a_culprit_of_as_many_sequences_as_there_are_rows(llm, expected, trap):
    outputs = llm.generate(
        ids([GOOD[0], [8, 8, 8]]),
        [GREEDY, GREEDY.replace(n=4, logit_bias={POISON: 100.0})],
        use_tqdm=False,
    )
    assert {c.finish_reason for c in outputs[1].outputs} == {"error"}
    assert_good(outputs[:1], expected)
    assert_good(llm.generate(ids(GOOD), GREEDY, use_tqdm=False), expected)


def test_one_bad_request_after_another(llm, expected, trap):
    for _ in range(5):
        (output,) = llm.generate(ids([[POISON]]), GREEDY, use_tqdm=False)
        assert output.outputs[0].finish_reason == "error"
    for _ in range(4):
        outputs = llm.generate(ids([[POISON], [POISON, POISON]]), GREEDY, use_tqdm=False)
        assert [o.outputs[0].finish_reason for o in outputs] == ["error", "error"]
    assert_good(llm.generate(ids(GOOD), GREEDY, use_tqdm=False), expected)


@pytest.mark.parametrize("num_prompts", [1, 7])
def test_what_fails_once_costs_nobody_anything(llm, expected, trap, num_prompts):
    for _ in range(3):
        trap.times = 1
        assert_good(llm.generate(ids(GOOD[:num_prompts]), GREEDY, use_tqdm=False), expected)
    assert trap.failures >= 3


@pytest.mark.parametrize("num_prompts", [1, 7])
def test_a_model_that_always_fails_kills_the_engine(llm, trap, num_prompts):
    trap.times = float("inf")
    with pytest.raises(EngineDeadError, match="FloatingPointError: the trap has sprung"):
        llm.generate(ids(GOOD[:num_prompts]), GREEDY, use_tqdm=False)


def test_an_aborted_culprit_is_nobodys_fault(llm, expected, trap):
    engine = llm.engine
    done = {}
    engine.add_request("good", ids(GOOD)[0], GREEDY)
    engine.step()
    engine.add_request("bad", {"prompt_token_ids": [POISON]}, GREEDY)
    while engine.has_unfinished_requests():
        # With overlap, its step may be on its way.
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        engine.abort("bad")
    assert_good([done["good"]], expected)


def test_an_interrupt_leaves_an_engine_that_works(llm, expected, monkeypatch):
    model = llm.engine.client.core.executor.runner.model
    forward = model.forward
    calls = []

    def interrupted(input_ids, positions):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return forward(input_ids, positions)

    monkeypatch.setattr(model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(ids(GOOD), GREEDY, use_tqdm=False)
    assert llm.engine.client.core.scheduler.blocks.num_used == 0
    assert_good(llm.generate(ids(GOOD), GREEDY, use_tqdm=False), expected)
