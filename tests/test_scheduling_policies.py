"""A third party's scheduling policy decides who is served next."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError
from toolkit_lm.scheduler import Request
from toolkit_lm_devkit import SchedulingPolicyConformance

SOURCE = Path(__file__).parent / "plugins" / "shortest_first"
PROMPTS = [{"prompt_token_ids": [5] * length} for length in (9, 2, 30, 4)]


@pytest.fixture
def shortest_first(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE)
    return importlib.import_module("shortest_first")


class TestShortestFirst(SchedulingPolicyConformance):
    orders = ([{"prompt_token_ids": [5]}, {"prompt_token_ids": [5, 6]}, {"prompt_token_ids": [5, 6], "arrival_time": 1e6}],)

    @staticmethod
    def policy(request: Request) -> tuple[float, ...]:
        spec = importlib.util.spec_from_file_location("shortest_first_policy", SOURCE / "shortest_first_policy.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.shortest_first(request)


def served(llm) -> list[int]:
    """The lengths of the prompts, in the order of their outputs."""
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(str(index), prompt, SamplingParams(max_tokens=2, ignore_eos=True))
    found = []
    while llm.engine.has_unfinished_requests():
        found += [len(output.prompt_token_ids) for output in llm.engine.step() if output.finished]
    return found


def test_the_shortest_prompt_is_served_first(shortest_first):
    with LLM("tiny", plugins=[shortest_first], scheduling_policy="shortest_first", max_num_seqs=1) as llm:
        assert served(llm) == [2, 4, 9, 30]
    with LLM("tiny", plugins=[shortest_first], max_num_seqs=1) as llm:
        assert served(llm) == [9, 2, 30, 4]


def test_an_unknown_policy_is_an_error_that_names_the_known_ones(shortest_first):
    with pytest.raises(ConfigError, match=r"no scheduling policy 'longest' is registered\. Known: fair, fcfs, priority, shortest_first\."):
        LLM("tiny", plugins=[shortest_first], scheduling_policy="longest")
