"""Tokens that must follow are computed in one step, and change nothing but the number of steps."""

from __future__ import annotations

import json

import pytest
from schemas import SCHEMAS
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import StepEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm_structured_output.processor import StructuredOutput

SCHEMA = {
    "type": "object",
    "properties": {
        "first name": {"type": "string", "maxLength": 6},
        "occupation": {"enum": ["a baker in the town", "a king", "a beggar"]},
        "is_employed": {"type": "boolean"},
    },
    "required": ["first name", "occupation", "is_employed"],
    "additionalProperties": False,
}
ASKED = [
    {"json": SCHEMA, "disable_any_whitespace": True},
    {"json": SCHEMA},
    {"choice": ["a long choice of several words", "another one"]},
    {"json": SCHEMAS["nested"]},
    {"regex": "The [a-z]{3,5} is here, and nobody knows why"},
    None,
]
PROMPTS = [
    "Once upon a time there was a little cat that lived near the sea and was very happy",
    "It",
    "One day the king",
    "x y z " * 6,
] * 2


class Steps:
    """A plugin that counts steps and preemptions."""

    name = "steps"

    def __init__(self):
        self.count = 0
        self.preempted = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += isinstance(event, StepEvent)
        self.preempted += getattr(event, "kind", None) == "preempted"


STEPS = Steps()


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", dtype="float32", max_num_seqs=32, plugins=[STEPS]) as llm:
        yield llm


def run(llm, given, asked=ASKED):
    """Outputs of the requests, and their number of steps."""
    before = STEPS.count
    params = [
        SamplingParams(**{"max_tokens": 80, "seed": 5, "structured_outputs": one, **given})
        for one in asked
    ]
    outputs = llm.generate(PROMPTS[: len(params)], params, use_tqdm=False)
    found = [
        (
            one.token_ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            ranks(one.logprobs),
            output.error,
        )
        for output in outputs
        for one in output.outputs
    ]
    return found, STEPS.count - before


def ranks(logprobs):
    return [
        [(token, entry.rank, round(entry.logprob, 2)) for token, entry in one.items()]
        for one in logprobs or ()
    ]


@pytest.fixture
def in_turns(monkeypatch):
    """in_turns(function) -> what it gives with drafts, and without."""

    def in_turns(function):
        drafted = function()
        monkeypatch.setattr(StructuredOutput, "drafts", lambda self, row: [])
        plain = function()
        monkeypatch.undo()
        return drafted, plain

    return in_turns


CASES = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1.2},
    "several": {"temperature": 1.2, "n": 3},
    "the best of several": {"temperature": 1.2, "n": 2, "best_of": 3},
    "log probabilities": {"temperature": 0, "logprobs": 3},
    "of prompts too": {"temperature": 1, "prompt_logprobs": 1},
    "stop texts": {"temperature": 1, "stop": ["name", "choice", "here"]},
    "stop tokens": {"temperature": 1, "stop_token_ids": list(range(60, 90))},
    "min_tokens": {"temperature": 1.5, "min_tokens": 30},
    "ignore_eos": {"temperature": 1, "ignore_eos": True},
    "a cut": {"temperature": 1, "max_tokens": 7},
    "penalties and filters": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "top_k": 9,
        "top_p": 0.9,
        "logit_bias": {5: -100.0},
    },
    "other processors": {"temperature": 1, "extra_args": {"mirostat_tau": 3.0, "typical_p": 0.9}},
}


@pytest.mark.parametrize("case", CASES)
def test_they_change_nothing(llm, in_turns, case):
    (drafted, some), (plain, all_) = in_turns(lambda: run(llm, CASES[case]))
    assert drafted == plain
    assert some <= all_


def test_what_other_rules_leave_nothing_of_fails_as_ever(llm, in_turns):
    """Tokens that a step has drawn before do not count."""
    given = {"temperature": 0.5, "bad_words": ["first"], "max_tokens": 120}
    ([drafted], _), ([plain], _) = in_turns(lambda: run(llm, given, ASKED[:1]))
    assert drafted[-1] == plain[-1] and "leave no token" in drafted[-1]
    assert plain[1].startswith(drafted[1])


def test_a_forced_run_begins_where_the_drawn_token_ends(llm):
    """A token that reaches into what is forced may be drawn. A shorter one is not taken back."""
    asked = {"regex": " (t|w)here is a cat in the house, and it is happy\\."}
    ruled_out: list[int] = []
    for _ in range(3):
        bias = dict.fromkeys(ruled_out, -100.0)
        [(tokens, text, *_)], _ = run(llm, {"temperature": 0, "logit_bias": bias}, [asked])
        assert text[2:] == "here is a cat in the house, and it is happy."
        ruled_out.append(tokens[0])
    tokenizer = llm.get_tokenizer()
    firsts = [tokenizer.decode([token]) for token in ruled_out]
    assert len(set(firsts)) == 3
    # The border of what is forced lies inside of the first.
    assert max(len(first.strip()) for first in firsts) > len("t")
    assert min(len(first.strip()) for first in firsts) < len("there")


TIGHT = {
    "num_kv_blocks": 52,
    "block_size": 4,
    "max_model_len": 120,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 16,
}


@pytest.mark.parametrize(
    "options",
    [
        TIGHT,
        {**TIGHT, "preemption_mode": "swap", "swap_memory": "4MiB"},
        {"enable_prefix_caching": True, "block_size": 4},
        {"overlap": True},
        {"scheduling_policy": "fair"},
    ],
    ids=["recomputed", "swapped", "cached", "overlap", "fair"],
)
def test_engines_of_all_kinds_agree(llm, options):
    given = {"temperature": 1.2, "n": 2}
    (expected, _) = run(llm, given)
    before = STEPS.preempted
    with LLM("tiny", dtype="float32", plugins=[STEPS], **options) as other:
        for _ in range(2):
            assert run(other, given)[0] == expected
    assert STEPS.preempted > before or options.get("num_kv_blocks") is None


def test_json_takes_few_steps(llm):
    (found, steps) = run(llm, {"temperature": 1.0}, ASKED[:1])
    assert json.loads(found[0][1])
    assert steps < 0.6 * len(found[0][0]), f"{steps} steps for {len(found[0][0])} tokens"


def test_masks_are_made_while_the_forward_pass_runs(llm, in_turns, monkeypatch):
    """Without a forward pass to overlap with, masks are made after it, and are the same."""
    made = []
    fill = StructuredOutput._fill

    def watched(places):
        import threading

        lacking = sum(place.mask is None for _, place in places)
        fill(places)
        made.append((threading.current_thread().name.startswith("structured_output"), lacking))

    monkeypatch.setattr(StructuredOutput, "_fill", staticmethod(watched))
    beside, _ = run(llm, {"temperature": 1.0})
    assert sum(count for aside, count in made if aside) > 3 * sum(
        count for aside, count in made if not aside
    )
    monkeypatch.setattr(StructuredOutput, "begin", lambda self, rows: None)
    made.clear()
    assert run(llm, {"temperature": 1.0})[0] == beside
    assert not any(aside for aside, _ in made)
