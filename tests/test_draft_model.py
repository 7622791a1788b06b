"""Speculative decoding with a draft model: its layers have a KV group of their own, and nothing it
does changes a token."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import StepEvent
from toolkit_lm.plugin import PluginWarning, hookimpl
from toolkit_lm_drafters.draft_model import DraftModelDrafter

FOLDER = Path(__file__).parent / "plugins"
sys.path.insert(0, str(FOLDER / "threads"))
THREADS = importlib.import_module("toolkit_lm_threads")
PROMPTS = [[3 + (i * k) % 97 for i in range(length)] for k, length in ((1, 24), (3, 9), (5, 40))]


class Steps:
    """A plugin that counts steps and preemptions."""

    name = "steps"

    def __init__(self) -> None:
        self.count = 0
        self.preempted = 0

    @hookimpl
    def toolkit_event(self, event) -> None:
        self.count += isinstance(event, StepEvent)
        self.preempted += getattr(event, "kind", None) == "preempted"


def run(
    folder,
    draft,
    params,
    prompts=PROMPTS,
    again=1,
    given=(THREADS,),
    own=(),
    **options,
):
    """Tokens of the last of `again` runs, and the plugin that counted its steps. `own`: options of
    other plugins than the drafter."""
    options = {
        "dtype": "float32",
        "renderer": "tokens",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        "num_kv_blocks": 400,
    } | options
    drafting = (
        {}
        if draft is None
        else {
            "drafter": "draft_model",
            "draft_budget": "all",
            "plugin_option": [
                *own,
                f"drafters.model={draft}",
                "drafters.num_speculative_tokens=3",
            ],
        }
    )
    steps = Steps()
    with LLM(str(folder), plugins=[*given, steps], **drafting, **options) as llm:
        for _ in range(again):
            steps.count = 0
            outputs = llm.generate([{"prompt_token_ids": one} for one in prompts], params)
        assert not any(one.error for one in outputs)
        return [[list(one.token_ids) for one in output.outputs] for output in outputs], steps


def params(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "detokenize": False} | fields)


@pytest.fixture(scope="module")
def folders(make_llama):
    """The large model, and a small one with the same tokens."""
    return make_llama("large")[0], make_llama(
        "small", num_hidden_layers=1, hidden_size=32, num_attention_heads=2
    )[0]


CASES = {
    "greedy": {"temperature": 0},
    "random": {"temperature": 1, "seed": 5},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
    },
    "filters": {"temperature": 0.7, "seed": 9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "rules": {"temperature": 0, "min_tokens": 9, "logit_bias": {5: 2.0}, "ignore_eos": False},
}


@pytest.mark.parametrize("case", CASES)
def test_a_draft_that_is_the_target_is_always_right(folders, case):
    """One draw of the prompt's step, then four tokens a step: 23 more take six steps."""
    folder, _ = folders
    given = params(**CASES[case])
    prompts = PROMPTS[:1]
    plain, _ = run(folder, None, given, prompts)
    drafted, steps = run(folder, folder, given, prompts)
    assert drafted == plain
    assert steps.count == 1 + -(-(len(plain[0][0]) - 1) // 4)


def test_a_small_model_changes_no_token(folders):
    for fields in ({"temperature": 0}, {"temperature": 0.9, "seed": 4, "n": 3}):
        plain, _ = run(folders[0], None, params(**fields))
        assert run(folders[0], folders[1], params(**fields))[0] == plain


@pytest.mark.parametrize(
    "options",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_memory": "4MiB"}],
)
def test_it_is_right_after_a_preemption_too(folders, options):
    """The draft's KV comes back with the request: without, the drafts after it would be others."""
    given = params(temperature=1, seed=7, max_tokens=40)
    plain, _ = run(folders[0], None, given)
    drafted, steps = run(folders[0], folders[0], given, num_kv_blocks=40, **options)
    assert steps.preempted
    assert drafted == plain
    _, others = run(folders[0], None, given, num_kv_blocks=40, **options)
    assert steps.count < others.count / 2, f"{steps.count} steps of {others.count}"


def test_a_cached_prefix_holds_the_small_model_s_keys_too(folders):
    given = params(temperature=0)
    plain, _ = run(folders[0], None, given, PROMPTS[2:])
    first, steps = run(folders[0], folders[0], given, PROMPTS[2:], enable_prefix_caching=True)
    chunks = 2
    assert first == plain and steps.count == chunks + 6
    again, steps = run(
        folders[0], folders[0], given, PROMPTS[2:], again=2, enable_prefix_caching=True
    )
    # The prompt is one chunk now, and its drafts are right as before.
    assert again == plain and steps.count == 1 + 6


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_ranks_and_stages(folders, tensor, pipeline):
    sizes = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "executor": "threads",
    }
    plain, _ = run(folders[0], None, params(temperature=0), **sizes)
    drafted, _ = run(folders[0], folders[1], params(temperature=0), **sizes)
    assert drafted == plain


@pytest.mark.parametrize("executor", ["mp", pytest.param("ray", marks=pytest.mark.slow)])
def test_ranks_that_are_processes(folders, executor):
    options = {"tensor_parallel_size": 2, "executor": executor, "device": "cpu", "given": ()}
    own = [] if executor == "mp" else ["executor_ray.address=local"]
    plain, _ = run(folders[0], None, params(temperature=0), given=())
    # Drafts of a model that is its own target are always taken.
    drafted, steps = run(folders[0], folders[0], params(temperature=0), own=own, **options)
    assert drafted == plain
    assert steps.count < 24


def test_at_the_longest_length_nothing_is_drafted(folders):
    prompt = [[3 + k % 90 for k in range(100)]]
    given = params(temperature=0, max_tokens=28)
    plain, _ = run(folders[0], None, given, prompt)
    assert run(folders[0], folders[0], given, prompt)[0] == plain


def test_a_pass_beyond_the_slots_is_refused(folders, monkeypatch):
    """And not written into another sequence's blocks: the tokens stay as they are."""
    kind = DraftModelDrafter
    made = kind.__init__

    def without_lookahead(self, *arguments, **named):
        made(self, *arguments, **named)
        self.lookahead = 0

    plain, _ = run(folders[0], None, params(temperature=0))
    monkeypatch.setattr(kind, "__init__", without_lookahead)
    with pytest.warns(PluginWarning, match="has no slot in KV group .*`lookahead`"):
        drafted, _ = run(folders[0], folders[1], params(temperature=0))
    assert drafted == plain


def test_a_draw_changes_no_state(folders, monkeypatch):
    kind = DraftModelDrafter
    finish = kind.finish
    seen = []

    def watched(self, inputs, hidden_states, result, step):
        histories = inputs.histories
        before = histories.token_ids.copy(), histories.num_tokens.copy()
        finish(self, inputs, hidden_states, result, step)
        seen.append(all(map(np.array_equal, before, (histories.token_ids, histories.num_tokens))))

    monkeypatch.setattr(kind, "finish", watched)
    run(folders[0], folders[1], params(temperature=1, seed=2))
    assert seen and all(seen)
