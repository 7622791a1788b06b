"""Rows that sit out steps change no token: every way of sampling, with and without drafts."""

from __future__ import annotations

import importlib
import sys

import pytest
from toolkit_lm import LLM, SamplingParams

POLICY = """
from random import Random

from toolkit_lm.plugin import hookimpl
from toolkit_lm.scheduler import SchedulingPolicy


class Resting(SchedulingPolicy):
    '''Draws who sits a step out, and who computes a part of it. No two steps in a row are empty.'''

    rested = cut = 0

    def __init__(self, config):
        super().__init__(config)
        self.draws = Random(3)
        self.computes = True

    def begin_step(self, running, waiting):
        self.forced, self.computes = not self.computes, False
        return waiting

    def grant(self, request, budget):
        granted = budget if self.forced else self.draws.choice([0, 0, 1, 2, budget])
        if granted < request.least_tokens:
            granted = budget if self.forced else 0
        Resting.rested += granted == 0
        Resting.cut += 0 < granted < request.num_wanted_tokens
        self.computes = self.computes or granted > 0
        return granted


@hookimpl
def toolkit_register_scheduling_policies(policies):
    policies.add("resting", "resting_policy:Resting")
"""
TEXT = "Once upon a time there was a cat. The cat said: I am a cat. The cat said: I am a cat. The"
CASES = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.8, "seed": 5},
    "penalties": {"temperature": 0, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
    "filters": {"temperature": 0.7, "seed": 9, "min_p": 0.02, "top_p": 0.95, "top_k": 40},
    "grammar": {
        "temperature": 0,
        "ignore_eos": False,
        "structured_outputs": {"regex": "( [a-z]+){2,5}(\\. The cat said){1,4}"},
    },
    "stop": {"temperature": 0, "stop": ["a cat", "with"], "min_tokens": 4},
    "four": {"temperature": 0.9, "seed": 3, "n": 4},
    "log probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 2},
    "beams": {"temperature": 0, "use_beam_search": True, "n": 2, "max_tokens": 8},
}


@pytest.fixture
def resting(tmp_path, monkeypatch):
    (tmp_path / "resting_policy.py").write_text(POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "resting_policy", raising=False)
    yield importlib.import_module("resting_policy")
    sys.modules.pop("resting_policy", None)


def run(**options):
    params = [
        SamplingParams(**{"max_tokens": 24, "ignore_eos": True} | fields)
        for fields in CASES.values()
    ]
    prompts = [f"{number} {TEXT}" for number in range(len(params))]
    with LLM("tiny", dtype="float32", max_model_len=128, block_size=4, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(params)
    return {
        case: [shown(choice) for choice in output.outputs]
        for case, output in zip(CASES, outputs, strict=True)
    }


def shown(choice):
    ranks = [[entry.rank for entry in entries.values()] for entries in choice.logprobs or ()]
    return choice.token_ids, choice.text, choice.finish_reason, choice.stop_reason, ranks


@pytest.fixture(scope="module")
def plain():
    return run()


COURSES = {
    "plain": {"overlap": False},
    "overlapping": {"overlap": True},
    "preempted": {"num_kv_blocks": 80, "preemption_mode": "recompute"},
    "swapped": {"num_kv_blocks": 80, "preemption_mode": "swap", "swap_memory": "8MiB"},
    "drafts": {"drafter": "ngram", "draft_budget": "all"},
    "chosen drafts": {"drafter": "ngram"},
}


@pytest.mark.parametrize("course", COURSES)
def test_rows_that_sit_out_steps_get_the_same_tokens(plain, resting, course):
    found = run(
        plugins=[resting],
        scheduling_policy="resting",
        max_num_batched_tokens=64,
        max_num_seqs=24,
        **COURSES[course],
    )
    for case, choices in found.items():
        assert choices == plain[case], f"{case}: other tokens than in a step of their own"
    assert resting.Resting.rested > 50 and resting.Resting.cut > 5
