"""ModelRunner on a device that works late."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import CurrentDevice, FakeCuda
from fake_model import (
    SumBackend,
    continuation,
    make_config,
    make_plugins,
    make_runner,
    new,
    next_token,
    row,
)
from toolkit_lm.messages import StepPlan
from toolkit_lm.runner import ModelRunner, profile, row_sampler
from toolkit_lm.runner.warm_up import _MOST_MEMORY
from toolkit_lm.sampling import filters, sample
from toolkit_lm_devkit import sampling_rows

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture
def cuda():
    with FakeCuda() as cuda:
        yield cuda


@pytest.fixture
def runner(cuda):
    runner = make_runner(device="cuda")
    yield runner
    runner.shutdown()


def test_a_step_that_draws_nothing_ends_when_it_is_computed(cuda, runner):
    """So that its duration is its own."""
    plan = StepPlan(new=[new(0, PROMPT, [7, 2])], scheduled=[row(0, 2, samples=False)])
    assert runner.execute(plan).token_ids == [[]]
    assert cuda.num_pending == 0
    plan = StepPlan(scheduled=[row(0, 3, start=2)])
    assert runner.execute(plan).token_ids == [continuation(PROMPT, 1)]
    assert cuda.num_pending == 0


def test_chunks_beside_draws(runner):
    plan = StepPlan(
        new=[new(0, PROMPT, [7, 2]), new(1, [2, 2], [3])],
        scheduled=[row(0, 2, samples=False), row(1, 2)],
    )
    assert runner.execute(plan).token_ids == [[], [next_token([2, 2])]]
    plan = StepPlan(scheduled=[row(0, 3, start=2), row(1, 1, start=2)])
    assert runner.execute(plan).token_ids == [continuation(PROMPT, 1), continuation([2, 2], 2)[1:]]


def test_a_backend_is_asked_where_the_model_s_gpu_is_the_current_one(cuda, monkeypatch):
    """GPUs of one machine may differ in their capabilities."""
    asked = []
    monkeypatch.setattr(SumBackend, "refuses", lambda spec: asked.append(CurrentDevice.now()))
    make_runner(device="cuda:3")
    assert set(asked) == {3} and CurrentDevice.now() == 0


def test_the_largest_step_draws_as_what_takes_the_most_memory(cuda, monkeypatch):
    """On a GPU what it took is no longer free when the KV cache gets its share."""
    drawn = []

    def sampling(logits, rows, likeliest):
        drawn.append((len(logits), rows.temperature.tolist(), bool((rows.top_p < 1).all())))
        return sample(logits, rows, likeliest)

    monkeypatch.setattr(row_sampler, "sample", sampling)
    runner = ModelRunner(make_config(device="cuda"), make_plugins())
    runner.load()
    profile(runner)
    assert drawn == [(4, [1.0] * 4, True)]
    # Among the likeliest 256, as many as float32 can tell apart are kept; sorting all shows whether
    # there are more.
    probs, is_certain = filters._first(
        torch.zeros(1, 300), torch.arange(256)[None], sampling_rows(_MOST_MEMORY)
    )
    assert not is_certain.any() and (probs > 0).sum() == 256
