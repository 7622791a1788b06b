"""One draw for all positions of drafted rows: the same tokens as without drafts, whatever has a say
in them."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from test_drafts import CASES, PROMPTS, Steps, engine, generate, same
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.plugin import DrafterRegistry, hookimpl
from toolkit_lm.runner import row_sampler
from toolkit_lm.step import Drafter
from toolkit_lm_structured_output.processor import StructuredOutput

SCRIPTS: list[list[int]] = []
"""Prompts and answers that are to come."""
STEPS = Steps()


class Scripted(Drafter):
    """Drafts four of the tokens that follow in SCRIPTS. After texts of an odd length the third is
    wrong."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        size = len(token_ids)
        found = (script for script in SCRIPTS if script[:size] == token_ids.tolist())
        drafts = next(found, [])[size : size + 4]
        if size % 2 and len(drafts) > 2:
            drafts[2] = (drafts[2] + 1) % 90
        return drafts


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("scripted", f"{__name__}:Scripted")


SCRIPTED = SimpleNamespace(
    name="scripted_drafts", toolkit_register_drafters=toolkit_register_drafters
)
VERIFIED = {
    **CASES,
    "random penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
    "filters and log probabilities": {
        "temperature": 0.8,
        "seed": 3,
        "min_p": 0.02,
        "top_p": 0.95,
        "logprobs": 2,
        "repetition_penalty": 1.1,
    },
    "processors of tokens": {
        "temperature": 1,
        "seed": 6,
        "extra_args": {
            "dry_multiplier": 0.8,
            "no_repeat_ngram_size": 2,
            "xtc_probability": 0.5,
            "typical_p": 0.9,
            "epsilon_cutoff": 3e-4,
        },
    },
    "a processor with state": {"temperature": 1, "seed": 6, "extra_args": {"mirostat_tau": 3.0}},
}
STEPPING = ("processors", "a processor with state")
"""Cases in which mirostat counts what was drawn."""


@pytest.fixture(scope="module")
def engines(make_llama):
    """With a drafter that knows most of the text, and without."""
    folder, _ = make_llama("drafts")
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(engine(folder, drafter, [SCRIPTED, STEPS]))
            for drafter in ("scripted", None)
        ]


@pytest.fixture
def calls(monkeypatch):
    """Numbers of positions of the sampler's calls."""
    made = []
    for name in ("sample", "greedy_sample"):

        def counted(values, *others, original=getattr(row_sampler, name)):
            made.append(len(values))
            return original(values, *others)

        monkeypatch.setattr(row_sampler, name, counted)
    return made


def script(prompts, outputs) -> None:
    SCRIPTS[:] = [
        [*prompt, *one.token_ids]
        for prompt, output in zip(prompts, outputs, strict=True)
        for one in output.outputs
    ]


@pytest.mark.parametrize("case", VERIFIED)
def test_all_drafts_of_a_step_are_verified_in_one_draw(engines, calls, case):
    drafting, plain = engines
    params = SamplingParams(
        **{"max_tokens": 24, "ignore_eos": True, "detokenize": False} | VERIFIED[case]
    )
    expected = generate(plain, params)
    script(PROMPTS, expected)
    calls.clear()
    before = STEPS.count
    same(generate(drafting, params), expected)
    steps = STEPS.count - before
    assert steps < 18, "most drafts are accepted"
    if case not in STEPPING:
        assert len(calls) <= steps and max(calls) > len(PROMPTS)


class Disallowing(Scripted):
    """Drafts what no grammar allows behind two tokens that it does."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        drafts = super().propose(token_ids)[:2]
        return [*drafts, 1, 1, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_end_where_a_grammar_forbids_them(temperature, calls, monkeypatch):
    """They cost no position, and the matcher that has read drafts is where it would be without."""
    prompts = ["a b c d " * 6, "One day one day one day", "1 2 1 2 1 2 1 2"]
    asked = [
        {"regex": "(a b c d ?|e){3,12}"},
        {"choice": ["a long choice of several words", "another one"]},
        {"grammar": 'root ::= ("1 2 " | "3")+'},
    ]
    params = [
        SamplingParams(
            max_tokens=30, seed=2, temperature=temperature, structured_outputs=one, logprobs=1
        )
        for one in asked
    ]
    # The grammar drafts tokens that must follow itself, which leaves nothing to verify.
    monkeypatch.setattr(StructuredOutput, "drafts", lambda self, row: [])
    with LLM("tiny", dtype="float32") as llm:
        ids = [llm.engine.renderer.render_prompt(prompt).token_ids for prompt in prompts]
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert [output.error for output in expected] == [None] * 3
    script(ids, expected)
    cut = []
    num_allowed = StructuredOutput.num_allowed

    def watched(self, row, drafts):
        allowed = num_allowed(self, row, drafts)
        cut.append(len(drafts) - allowed)
        return allowed

    monkeypatch.setattr(StructuredOutput, "num_allowed", watched)
    monkeypatch.setattr(sys.modules[__name__], "Scripted", Disallowing)
    with LLM(
        "tiny", dtype="float32", plugins=[SCRIPTED], drafter="scripted", draft_budget="all"
    ) as llm:
        calls.clear()
        found = llm.generate(prompts, params, use_tqdm=False)
    same(found, expected)
    assert max(calls) <= 9, "three rows of at most two allowed drafts"
    assert sum(cut) >= 3 * len(calls) // 2
