"""ModelRunner on a device that works late."""

from __future__ import annotations

import pytest
from fake_cuda import CurrentDevice, FakeCuda
from fake_model import SumBackend, continuation, make_runner, new, next_token, row
from toolkit_lm.messages import StepPlan

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
    """What a GPU can do differs between those of one machine."""
    asked = []
    monkeypatch.setattr(SumBackend, "refuses", lambda spec: asked.append(CurrentDevice.now()))
    make_runner(device="cuda:3")
    assert set(asked) == {3} and CurrentDevice.now() == 0
