"""What drafts for the embedded chat model: how many steps it saves on held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest
import toolkit_lm_tiny
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.events import StepEvent
from toolkit_lm.plugin import hookimpl

HEROES = ("dog", "king", "princess named Anna", "fox", "robot", "kind old owl")
"""A story's words are drawn anew: the model tells none that it was trained on."""
MESSAGES = [[{"role": "user", "content": f"Tell me a story about a {hero}."}] for hero in HEROES]
SAVED = {"draft_model": 0.55, "eagle": 0.42}
"""Least share of steps that are saved. Measured with 3 drafts: 0.68 and 0.56 greedily, 0.71 and
0.51 at temperature 1."""


class Steps:
    """A plugin that counts steps."""

    name = "steps"

    def __init__(self) -> None:
        self.count = 0

    @hookimpl
    def toolkit_event(self, event) -> None:
        self.count += isinstance(event, StepEvent)


def tell(temperature, **options) -> tuple[list[list[int]], int]:
    """Tokens of each story, told one after the other, and the number of steps."""
    steps = Steps()
    params = SamplingParams(temperature=temperature, seed=1, max_tokens=128)
    with LLM("tiny", plugins=[steps], dtype="float32", max_num_seqs=1, **options) as llm:
        steps.count = 0
        outputs = llm.chat(MESSAGES, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], steps.count


@pytest.fixture(scope="module", params=[0, 1])
def plain(request):
    return request.param, *tell(request.param)


@pytest.mark.parametrize("drafter", SAVED)
def test_drafts_save_steps_of_stories(plain, drafter):
    temperature, tokens, steps = plain
    model = f"drafters.model=tiny-{drafter.removesuffix('_model')}"
    options = [model, "drafters.num_speculative_tokens=3"]
    drafted, fewer = tell(temperature, drafter=drafter, draft_budget="all", plugin_option=options)
    assert drafted == tokens
    assert 1 - fewer / steps >= SAVED[drafter], f"{fewer} steps of {steps}"


@pytest.mark.parametrize("folder", ["checkpoint_draft", "checkpoint_eagle"])
def test_they_are_small(folder):
    path = Path(toolkit_lm_tiny.__file__).parent / folder / "model.safetensors"
    assert path.stat().st_size <= 2**20
