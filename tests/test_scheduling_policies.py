"""A third party's scheduling policy decides who is served next."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError, EngineDeadError
from toolkit_lm.scheduler import Request
from toolkit_lm_devkit import SchedulingPolicyConformance

SOURCE = Path(__file__).parent / "plugins" / "shortest_first"
PROMPTS = [{"prompt_token_ids": [5] * length} for length in (9, 2, 30, 4)]


@pytest.fixture
def shortest_first(monkeypatch):
    monkeypatch.syspath_prepend(SOURCE)
    return importlib.import_module("shortest_first")


class TestShortestFirst(SchedulingPolicyConformance):
    orders = (
        [
            {"prompt_token_ids": [5]},
            {"prompt_token_ids": [5, 6]},
            {"prompt_token_ids": [5, 6], "arrival_time": 1e6},
        ],
    )

    @staticmethod
    def policy(request: Request) -> tuple[float, ...]:
        spec = importlib.util.spec_from_file_location(
            "shortest_first_policy", SOURCE / "shortest_first_policy.py"
        )
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.shortest_first(request)


def served(llm, n: int = 1) -> list[int]:
    """The lengths of the prompts, in the order of their outputs."""
    for index, prompt in enumerate(PROMPTS):
        llm.engine.add_request(
            str(index), prompt, SamplingParams(max_tokens=2, ignore_eos=True, n=n)
        )
    found = []
    while llm.engine.has_unfinished_requests():
        found += [len(output.prompt_token_ids) for output in llm.engine.step() if output.finished]
    return found


def test_the_shortest_prompt_is_served_first(shortest_first):
    with LLM(
        "tiny", plugins=[shortest_first], scheduling_policy="shortest_first", max_num_seqs=1
    ) as llm:
        assert served(llm) == [2, 4, 9, 30]
    with LLM("tiny", plugins=[shortest_first], max_num_seqs=1) as llm:
        assert served(llm) == [9, 2, 30, 4]


FAILING = """
from toolkit_lm.plugin import hookimpl
from toolkit_lm.scheduler import SchedulingPolicy

class Failing(SchedulingPolicy):
    def METHOD(self, *given):
        raise ZeroDivisionError("nobody runs")

@hookimpl
def toolkit_register_scheduling_policies(policies):
    policies.add("failing", "failing_policy:Failing")
"""


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """failing(method): a plugin whose policy raises there."""

    def make(method: str):
        (tmp_path / "failing_policy.py").write_text(FAILING.replace("METHOD", method))
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "failing_policy", raising=False)
        return importlib.import_module("failing_policy")

    yield make
    sys.modules.pop("failing_policy", None)


@pytest.mark.parametrize("method", ["begin_step", "grant", "observe"])
def test_a_policy_that_always_fails_ends_the_engine_by_name(failing, method):
    said = (
        r"3 steps in a row have failed: plugin 'failing_policy' .*policy\.py:7\) failed in "
        rf"Failing\.{method}: ZeroDivisionError"
    )
    with (
        LLM("tiny", plugins=[failing(method)], scheduling_policy="failing", max_num_seqs=1) as llm,
        pytest.raises(EngineDeadError, match=said),
    ):
        served(llm)


@pytest.mark.parametrize("method", ["overtakes", "gives_way"])
def test_a_policy_that_fails_now_and_then_is_told_in_the_log(failing, caplog, method):
    with LLM("tiny", plugins=[failing(method)], scheduling_policy="failing", max_num_seqs=2) as llm:
        assert served(llm, n=2) == [9, 2, 30, 4]
    told = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("a step failed: ")
    ]
    assert told and all(f"failed in Failing.{method}: ZeroDivisionError" in one for one in told)


def test_an_unknown_policy_is_an_error_that_names_the_known_ones(shortest_first):
    with pytest.raises(
        ConfigError,
        match=r"no scheduling policy 'longest' is registered\. Known: fair, fcfs, priority, "
        r"shortest_first\.",
    ):
        LLM("tiny", plugins=[shortest_first], scheduling_policy="longest")
