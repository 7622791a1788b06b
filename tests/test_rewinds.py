"""Recurrent states that can go back: drafts are verified, and what is not drawn is taken back."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import test_conformance_kit_models as kit_models
import torch
import transformers
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import RequestEvent, StepEvent
from toolkit_lm.plugin import hookimpl
from toolkit_lm.step import Drafter
from toolkit_lm_devkit import make_checkpoint

FOLDER = Path(__file__).parent / "plugins"
sys.path.insert(0, str(FOLDER / "mamba"))
MAMBA = importlib.import_module("toolkit_lm_mamba")
PROMPTS = [
    [3 + (i * k) % period for i in range(length)]
    for k, period, length in ((1, 11, 24), (3, 7, 9), (5, 4, 40), (1, 3, 7))
]


class Steps:
    """A plugin that counts steps and preemptions."""

    name = "steps"

    def __init__(self):
        self.count = 0
        self.preempted = 0

    @hookimpl
    def toolkit_event(self, event):
        self.count += isinstance(event, StepEvent)
        self.preempted += isinstance(event, RequestEvent) and event.kind == "preempted"


@pytest.fixture(scope="module", params=["recurrent", "hybrid"])
def model(request, tmp_path_factory):
    """A checkpoint, and the plugins that it needs."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "hybrid":
        kit_models.TestHybrid().make_checkpoint(folder)
        return folder, [MAMBA, kit_models.HYBRID]
    torch.manual_seed(3)
    config = transformers.MambaConfig(
        vocab_size=272, hidden_size=32, state_size=8, num_hidden_layers=2, time_step_rank=4
    )
    theirs = transformers.MambaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "A_log" not in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return make_checkpoint(folder, theirs), [MAMBA]


def run(model, params, drafter=None, **options):
    """The tokens of each sequence, and what was counted."""
    folder, plugins = model
    steps = Steps()
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4} | options
    if drafter is not None:
        options["draft_budget"] = "all"
    with LLM(
        str(folder),
        plugins=[steps, *plugins],
        drafter=drafter,
        dtype="float32",
        max_model_len=96,
        plugin_option=["drafters.prompt_lookup_min=1"],
        **options,
    ) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, params, use_tqdm=False)
    assert not any(output.error for output in outputs)
    return [[one.token_ids for one in output.outputs] for output in outputs], steps


CASES = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 9},
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_change_no_token(model, case):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, _ = run(model, params, **CASES[case])
    drafted, _ = run(model, params, "ngram", **CASES[case])
    assert drafted == plain


class Oracle(Drafter):
    """Knows what will be drawn, and is wrong at times."""

    known: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def propose(self, token_ids):
        tokens = token_ids.tolist()
        prompt = next((one for one in self.known if tuple(tokens[: len(one)]) == one), None)
        if prompt is None:
            return []
        done = len(tokens) - len(prompt)
        drafts = self.known[prompt][done : done + 3]
        wrong = (done * 7) % 4
        return [(token + (index == wrong)) % 272 for index, token in enumerate(drafts)]


class OraclePlugin:
    name = "oracle"

    @hookimpl
    def toolkit_register_drafters(self, drafters):
        drafters.add("oracle", f"{__name__}:Oracle")


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_kept_up_to_the_first_wrong_one(model, case):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    plain, all_ = run(model, params, **CASES[case])
    # The engine imports this module anew.
    importlib.import_module(__name__).Oracle.known = {
        tuple(prompt): tokens for prompt, [tokens] in zip(PROMPTS, plain, strict=True)
    }
    drafted, some = run((model[0], [*model[1], OraclePlugin()]), params, "oracle", **CASES[case])
    assert drafted == plain
    assert some.count < 0.75 * all_.count, f"{some.count} steps of {all_.count}"


def test_drafts_of_drawn_sequences_are_refused_and_change_none(model):
    """Forks, each drawn with a seed of its own: most drafts are wrong."""
    params = SamplingParams(temperature=1.0, max_tokens=24, n=3, seed=11, ignore_eos=True)
    plain, _ = run(model, params)
    drafted, _ = run(model, params, "ngram")
    assert drafted == plain


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_sequences_go_on(model, mode):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, n=2)
    plain, _ = run(model, params)
    tight = {"preemption_mode": mode, "swap_memory": "4MiB", "max_num_batched_tokens": 16}
    drafted, steps = run(model, params, "ngram", num_kv_blocks=blocks_of(model), **tight)
    assert drafted == plain
    assert steps.preempted > 0


def blocks_of(model):
    return 3 if len(model[1]) == 1 else 45


def test_a_state_keeps_as_many_places_as_are_taken_back(model, monkeypatch):
    """Fewer would be wrong: the test can fail."""
    mixer = importlib.import_module("toolkit_lm_mamba.mixer")
    params = SamplingParams(temperature=1.0, max_tokens=24, seed=5, ignore_eos=True)
    plain, _ = run(model, params)
    spec = importlib.import_module("toolkit_lm_mamba.spec").MambaSpec
    monkeypatch.setattr(mixer, "REWINDS", 3)
    monkeypatch.setattr(spec, "places", property(lambda self: 1))
    assert run(model, params, "ngram")[0] != plain
