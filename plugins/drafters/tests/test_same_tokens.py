"""Drafts change no token: every way of sampling, in every course of a batch."""

from __future__ import annotations

import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl

TEXT = (
    "Once upon a time there was a cat. The cat said: I am a cat. The cat said: I am a cat. The cat"
)
COMMON = {"max_tokens": 32, "ignore_eos": True}
CASES = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 0.8, "seed": 5},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
    },
    "filters": {"temperature": 0.7, "seed": 9, "min_p": 0.02, "top_p": 0.95, "top_k": 40},
    "grammar": {
        "temperature": 0,
        "ignore_eos": False,
        "structured_outputs": {"regex": "( [a-z]+){2,5}(\\. The cat said){1,4}"},
    },
    "stop": {"temperature": 0, "stop": ["a cat", "with"], "min_tokens": 4},
    "four": {"temperature": 0.9, "seed": 3, "n": 4},
    "log probabilities": {"temperature": 0, "logprobs": 3},
    "processors": {
        "temperature": 0,
        "extra_args": {"no_repeat_ngram_size": 3, "dry_multiplier": 0.5},
    },
    "beams": {"temperature": 0, "use_beam_search": True, "n": 2, "max_tokens": 8},
}
_CHUNKED = {"max_num_batched_tokens": 24, "max_num_seqs": 24, "block_size": 4}
_TIGHT = {**_CHUNKED, "num_kv_blocks": 80}
COURSES = {
    "together": {},
    "in chunks": _CHUNKED,
    "preempted": {**_TIGHT, "preemption_mode": "recompute"},
    "swapped": {**_TIGHT, "preemption_mode": "swap", "swap_memory": "8MiB"},
    "overlapping": {"overlap": True},
    "cached": {"enable_prefix_caching": True, "block_size": 4},
}
DRAFTERS: dict[str, list[str]] = {
    "ngram": [],
    "suffix": [],
    "ngram,suffix": [],
    "draft_model,ngram": ["drafters.model=tiny-draft"],
    "suffix,eagle": ["drafters.model=tiny-eagle"],
}
"""Chains, and options of the plugin."""
BY_DAY = {
    ("ngram", "swapped"),
    ("suffix", "preempted"),
    ("draft_model,ngram", "preempted"),
    ("ngram,suffix", "overlapping"),
}


class Counts:
    """A plugin that counts."""

    name = "counts"

    def __init__(self) -> None:
        self.preempted = self.accepted = 0

    @hookimpl
    def toolkit_event(self, event) -> None:
        self.preempted += isinstance(event, RequestEvent) and event.kind == "preempted"
        if isinstance(event, StepEvent):
            self.accepted += sum(accepted for _, accepted in event.drafts)


def run(drafter, course):
    """What each request gave, twice, and the counts: drafts of the second time may come from the
    first."""
    counts = Counts()
    own = DRAFTERS.get(drafter, [])
    options = dict(COURSES[course])
    if own and "num_kv_blocks" in options:
        # A drafter's layers have a pool of their own, of as many blocks.
        options["num_kv_blocks"] = 48
    params = [SamplingParams(**COMMON | fields) for fields in CASES.values()]
    prompts = [f"{number} {TEXT}" for number in range(len(params))]
    found = []
    with LLM(
        "tiny",
        dtype="float32",
        max_model_len=128,
        drafter=drafter,
        # Whether drafts pay says nothing of the tokens.
        draft_budget="all",
        plugin_option=own,
        plugins=[counts],
        **options,
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.error for output in outputs] == [None] * len(params)
            found.append([[shown(one) for one in output.outputs] for output in outputs])
    return found, counts


def shown(output):
    ranks = [[entry.rank for entry in entries.values()] for entries in output.logprobs or ()]
    return output.token_ids, output.text, output.finish_reason, output.stop_reason, ranks


@pytest.fixture(scope="module")
def plain():
    [first, second], _ = run(None, "together")
    assert first == second
    return dict(zip(CASES, first, strict=True))


@pytest.mark.parametrize(
    ("drafter", "course"),
    [
        pytest.param(
            drafter, course, marks=() if (drafter, course) in BY_DAY else pytest.mark.nightly
        )
        for drafter in DRAFTERS
        for course in COURSES
    ],
)
def test_tokens_are_those_without_drafts(plain, drafter, course):
    found, counts = run(drafter, course)
    for outputs in found:
        for case, given in zip(CASES, outputs, strict=True):
            assert given == plain[case], f"{case}: other tokens with drafts than without"
    assert counts.accepted > 20
    assert bool(counts.preempted) == (course in ("preempted", "swapped"))
