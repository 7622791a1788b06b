"""Speculative decoding with a drafter (plugins/drafters): other steps, equal
results."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.distributed import tensor_parallel_group
from toolkit_lm.errors import ConfigError, PluginError, UnsupportedError
from toolkit_lm.events import StepEvent
from toolkit_lm.plugin import DrafterRegistry, PluginWarning, hookimpl
from toolkit_lm.step import Drafter
from toolkit_lm_devkit import DrafterConformance

FOLDER = Path(__file__).parent / "plugins"
for plugin in ("threads", "mamba"):
    sys.path.insert(0, str(FOLDER / plugin))
THREADS = importlib.import_module("toolkit_lm_threads")
PROMPTS = [
    [3 + (i * k) % 11 for i in range(length)] for k, length in ((1, 24), (3, 9), (5, 40), (0, 7))
]

TEXT = (
    "Once upon a time there was a cat. The cat said: I am a cat. The cat said: I am a cat. The cat"
)


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


def engine(folder, drafter, plugins=(), **options) -> LLM:
    options = {
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "block_size": 4,
        # Random weights repeat single tokens at most.
        "plugin_option": ["drafters.prompt_lookup_min=1", "drafters.prompt_lookup_max=3"],
    } | options
    if drafter is not None:
        options = {"draft_budget": "all"} | options
    return LLM(str(folder), plugins=[*plugins], drafter=drafter, **options)


def generate(llm, params, prompts=PROMPTS):
    prompts = [
        prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt} for prompt in prompts
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return outputs


def run(folder, params, drafter, plugins=(), prompts=PROMPTS, **options):
    """The outputs of an engine of its own, and the plugin that counts."""
    steps = Steps()
    with engine(folder, drafter, [steps, *plugins], **options) as llm:
        return generate(llm, params, prompts), steps


def same(some, others) -> None:
    for one, other in zip(some, others, strict=True):
        for mine, yours in zip(one.outputs, other.outputs, strict=True):
            assert (mine.token_ids, mine.text, mine.finish_reason, mine.stop_reason) == (
                yours.token_ids,
                yours.text,
                yours.finish_reason,
                yours.stop_reason,
            )
            assert (mine.logprobs is None) == (yours.logprobs is None)
            for entry, expected in zip(mine.logprobs or (), yours.logprobs or (), strict=True):
                assert [e.rank for e in entry.values()] == [e.rank for e in expected.values()]
                assert [e.logprob for e in entry.values()] == pytest.approx(
                    [e.logprob for e in expected.values()], abs=1e-3
                )


CASES = {
    "greedy": {"temperature": 0},
    "log probabilities": {"temperature": 0, "logprobs": 3},
    "random": {"temperature": 1, "seed": 5},
    "several": {"temperature": 1, "seed": 5, "n": 3},
    "penalties": {
        "temperature": 0,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.1,
    },
    "filters": {"temperature": 0.7, "seed": 9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "processors": {
        "temperature": 1,
        "seed": 2,
        "extra_args": {"mirostat_tau": 4.0, "no_repeat_ngram_size": 3},
    },
    "bad words": {
        "temperature": 0,
        "allowed_token_ids": list(range(3, 90)),
        "logit_bias": {5: 2.0},
    },
    "stops": {
        "temperature": 0,
        "ignore_eos": False,
        "min_tokens": 3,
        "stop_token_ids": list(range(3, 60)),
    },
}


@pytest.fixture(scope="module")
def engines(make_llama):
    """With drafts, and without."""
    folder, _ = make_llama("drafts")
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(engine(folder, drafter)) for drafter in ("ngram", None)]


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_without_drafts(engines, case):
    params = SamplingParams(
        **{"max_tokens": 30, "ignore_eos": True, "detokenize": False} | CASES[case]
    )
    same(*(generate(llm, params) for llm in engines))


def test_a_text_that_repeats_takes_fewer_steps():
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    drafted, some = run("tiny", params, "ngram", prompts=[TEXT])
    plain, all_ = run("tiny", params, None, prompts=[TEXT])
    same(drafted, plain)
    assert some.count < 0.85 * all_.count, f"{some.count} steps of {all_.count}"


@pytest.mark.parametrize("stop", ["e", "th", " a"])
def test_a_stop_text_between_drafts_ends_the_text_there(stop):
    params = SamplingParams(
        temperature=0, max_tokens=60, ignore_eos=True, stop=[stop], min_tokens=8, logprobs=0
    )
    prompts = [TEXT, "Once upon a time"]
    same(
        run("tiny", params, "ngram", prompts=prompts)[0],
        run("tiny", params, None, prompts=prompts)[0],
    )


@pytest.mark.parametrize(
    "options",
    [{"preemption_mode": "recompute"}, {"preemption_mode": "swap", "swap_memory": "4MiB"}],
)
def test_a_preempted_request_goes_on_with_its_drafts(make_llama, options):
    folder, _ = make_llama("drafts")
    # With seed 3 a number falls on the border of two tokens: the rounding of a batch of another
    # size decides.
    params = SamplingParams(temperature=1, seed=7, max_tokens=40, ignore_eos=True, detokenize=False)
    outputs, steps = run(folder, params, "ngram", num_kv_blocks=36, **options)
    assert steps.preempted
    same(outputs, run(folder, params, None)[0])


def test_windows_keep_what_a_rejected_draft_needs(make_windowed):
    folder, _ = make_windowed()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    same(run(folder, params, "ngram")[0], run(folder, params, None)[0])


@pytest.mark.parametrize(
    ("drafter", "tensor", "pipeline"), [("ngram", 2, 1), ("ngram", 1, 2), ("suffix,ngram", 2, 1)]
)
def test_ranks_and_stages_draft_too(make_llama, drafter, tensor, pipeline):
    folder, _ = make_llama("drafts")
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    sizes = {
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "executor": "threads",
    }
    outputs, steps = run(folder, params, drafter, [THREADS], num_kv_blocks=128, **sizes)
    expected, others = run(folder, params, None, [THREADS], num_kv_blocks=128, **sizes)
    same(outputs, expected)
    assert steps.count < others.count


def test_a_beam_search_beside_drafts(make_llama):
    folder, _ = make_llama("drafts")
    params = [
        SamplingParams(use_beam_search=True, n=2, temperature=0, max_tokens=12),
        *[SamplingParams(temperature=0, max_tokens=12)] * 3,
    ]
    same(run(folder, params, "ngram")[0], run(folder, params, None)[0])


class TestNgram(DrafterConformance):
    drafter = "ngram"


class Careful(Drafter):
    """Drafts the last token again. The classes below do one thing wrong each, in a step of a
    request and not at the start."""

    def propose(self, token_ids: np.ndarray) -> list[int]:
        return [int(token_ids[-1])] if len(token_ids) < 30 else self.wrong(token_ids)

    def wrong(self, token_ids: np.ndarray) -> list[int]:
        return []


class Raising(Careful):
    def wrong(self, token_ids):
        return [1 // 0]


class Leaving(Careful):
    def wrong(self, token_ids):
        raise SystemExit(3)


class Foreign(Careful):
    def wrong(self, token_ids):
        return [10**6]


class Negative(Careful):
    def wrong(self, token_ids):
        return [-1]


class NoList(Careful):
    def wrong(self, token_ids):
        return token_ids[-2:]


class Nothing(Careful):
    def wrong(self, token_ids):
        return None


class Sorting(Careful):
    def wrong(self, token_ids):
        token_ids.sort()
        return []


class Rewriting(Careful):
    """It writes into what others read of a sequence's tokens."""

    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        if inputs.token_index.max() > 30:
            inputs.histories.token_ids[:] = 5


class Redirecting(Careful):
    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        if inputs.token_index.max() > 30:
            inputs.groups[0].table[:] = 0


class Ending(Careful):
    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        if inputs.token_index.max() > 30:
            raise RuntimeError("no more drafts")


class Elsewhere(Careful):
    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        if inputs.token_index.max() > 30:
            result.drafts[10**9] = [1]


class Joining(Careful):
    def add(self, seq):
        if seq.seq_id > 2:
            raise KeyError(seq.seq_id)


class Parting(Careful):
    def remove(self, seq_id):
        if seq_id > 0:
            raise KeyError(seq_id)


class Drawing(Careful):
    """It writes tokens of its own into the result, which is a copy, so that nothing comes of it."""

    def finish(self, inputs, hidden_states, result, step):
        super().finish(inputs, hidden_states, result, step)
        for drawn in result.token_ids:
            drawn[:] = [7] * len(drawn)
        result.errors[inputs.plan.scheduled[0].seq_id] = "an error of a drafter's"


FAULTS = {
    Raising: r"failed in drafter 'Raising': ZeroDivisionError",
    Leaving: r"failed in drafter 'Leaving': SystemExit: 3",
    Foreign: r"Foreign has proposed \[1000000\]: no list of token ids",
    Negative: r"Negative has proposed \[-1\]: no list of token ids",
    NoList: r"NoList has proposed array\(.*\): no list of token ids",
    Nothing: r"Nothing has proposed None: no list of token ids",
    Sorting: r"ValueError: .*read-only",
    Rewriting: r"ValueError: .*read-only",
    Redirecting: r"ValueError: .*read-only",
    Ending: r"RuntimeError: no more drafts",
    Elsewhere: r"Elsewhere has proposed \[1\]: no list of token ids of a sequence that drew one",
    Joining: r"KeyError: 3",
    Parting: r"KeyError: \d",
    Drawing: None,
}
"""Each with what the warning says; None: there is none."""


class Together(Careful):
    """Its ranks wait for each other, and one does not come."""

    def wrong(self, token_ids):
        group = tensor_parallel_group(self.config.parallel)
        if group.rank == 1:
            raise ValueError("one rank alone")
        group.all_reduce(torch.zeros(1))
        return []


class Late(Together):
    """Its ranks wait for each other from the second time on: the first has one fail alone."""

    asked = 0

    def wrong(self, token_ids):
        self.asked += 1
        if self.asked == 1 and tensor_parallel_group(self.config.parallel).rank == 0:
            return []
        return super().wrong(token_ids)


class Unmade(Careful):
    def __init__(self, *arguments, **given):
        raise OSError("no draft model")


class Grouping(Careful):
    def groups(self, inputs):
        inputs.groups[0].slots[:] = 0


class Feeding(Careful):
    def inputs(self, inputs):
        return {}


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    for cls in (*FAULTS, Together, Late, Unmade, Grouping, Feeding):
        drafters.add(cls.__name__, f"{__name__}:{cls.__name__}")


FAULTY = SimpleNamespace(name="faulty", toolkit_register_drafters=toolkit_register_drafters)
LONG = [
    [3 + (i * k) % 11 for i in range(length)]
    for k, length in ((1, 24), (3, 9), (5, 40), (0, 7), (2, 27))
]


@pytest.fixture(scope="module")
def undrafted(make_llama):
    params = SamplingParams(temperature=1, seed=3, max_tokens=12, ignore_eos=True, detokenize=False)
    return params, run(make_llama("drafts")[0], params, None, prompts=LONG)[0]


@pytest.mark.parametrize("cls", FAULTS)
def test_a_drafter_that_fails_is_dropped_and_no_token_changes(make_llama, undrafted, cls):
    """One warning names it; no request ends, no other token is drawn, and the engine serves the
    next batch too."""
    params, expected = undrafted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PluginWarning)
        with engine(make_llama("drafts")[0], cls.__name__, [FAULTY]) as llm:
            same(generate(llm, params, LONG), expected)
            same(generate(llm, params, LONG), expected)
    told = [str(one.message) for one in caught if issubclass(one.category, PluginWarning)]
    if FAULTS[cls] is None:
        assert told == []
    else:
        [message] = told
        assert re.search(FAULTS[cls], message), message
        assert (
            "plugin 'faulty' (given from code" in message
            and "It is dropped: from now on nothing is drafted." in message
        )


@pytest.mark.parametrize("name", ["Together", "Late"])
def test_a_drafter_that_fails_on_one_rank_is_dropped_on_all(make_llama, undrafted, name):
    params, expected = undrafted
    options = {"executor": "threads", "tensor_parallel_size": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PluginWarning)
        with engine(make_llama("drafts")[0], name, [FAULTY, THREADS], **options) as llm:
            runners = llm.engine.client.core.executor.runners
            same(generate(llm, params, LONG), expected)
            held = [runner.parts.by_name["drafter"]._drafters for runner in runners]
            same(generate(llm, params, LONG), expected)
    assert held == [{}, {}]
    assert any("one rank alone" in str(one.message) for one in caught)


def test_a_drafter_that_fails_is_dropped_even_where_warnings_are_errors(make_llama, undrafted):
    params, expected = undrafted
    with warnings.catch_warnings():
        warnings.simplefilter("error", PluginWarning)
        with engine(make_llama("drafts")[0], "Ending", [FAULTY]) as llm:
            same(generate(llm, params, LONG), expected)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Unmade",
            (
                r"plugin 'faulty' .*test_drafts.py:\d+\) failed in drafter 'Unmade': OSError: no "
                r"draft model"
            ),
        ),
        (
            "Grouping",
            (
                r"plugin 'faulty' .*drafter 'Grouping' defines groups\(\): a drafter has no say "
                r"in the model's forward pass"
            ),
        ),
        ("Feeding", r"defines inputs\(\)"),
    ],
)
def test_a_drafter_that_can_be_no_drafter_is_refused_at_the_start(make_llama, name, message):
    with pytest.raises(PluginError, match=message):
        engine(make_llama("drafts")[0], name, [FAULTY])


def test_what_cannot_go_back_is_refused(tmp_path, monkeypatch):
    import torch
    import transformers
    from toolkit_lm_devkit import make_checkpoint

    mamba = importlib.import_module("toolkit_lm_mamba")
    monkeypatch.setattr(importlib.import_module("toolkit_lm_mamba.mixer"), "REWINDS", 0)
    config = transformers.MambaConfig(
        vocab_size=272, hidden_size=32, state_size=8, num_hidden_layers=1, time_step_rank=4
    )
    folder = make_checkpoint(tmp_path, transformers.MambaForCausalLM(config).to(torch.float32))
    with pytest.raises(
        UnsupportedError, match="drafter 'ngram': drafts are for engines that generate"
    ):
        LLM(str(folder), plugins=[mamba], drafter="ngram", max_model_len=64)
    with pytest.raises(UnsupportedError, match="drafter 'ngram'"):
        LLM("tiny", drafter="ngram", runner="pooling", convert="embed")


def test_toolkit_register_drafters_makes_names_known():
    with pytest.raises(ConfigError, match=r"no drafter 'n-gram' is registered\..*ngram"):
        LLM("tiny", drafter="n-gram")
