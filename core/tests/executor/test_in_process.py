"""The in-process executor: one worker, in the engine's thread or in one of its own."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_cuda import CurrentDevice
from fake_model import NAN, SumModel, make_config, make_plugins, new, next_token, row
from toolkit_lm.errors import CheckpointError
from toolkit_lm.executor import InProcessExecutor, in_process
from toolkit_lm.kv import plan_groups
from toolkit_lm.messages import StepPlan

PROMPT = [3, 1, 4, 1, 5]


def overlaps(executor) -> bool:
    return executor.max_in_flight > 1


@pytest.fixture(params=[False, True], ids=["same thread", "overlap"])
def executor(request):
    executor = InProcessExecutor(make_config(overlap=request.param), make_plugins())
    executor.load()
    [specs] = executor.kv_cache_specs()
    executor.init_kv_cache([plan_groups(specs, executor.backends()).sized([8], [0])])
    yield executor
    executor.shutdown()


def test_a_step_s_future_brings_its_result(executor):
    future = executor.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    assert future.result(timeout=10).token_ids == [[next_token(PROMPT)]]


def test_a_step_s_failure_is_in_its_future(executor):
    future = executor.execute(StepPlan(scheduled=[row(99, 1)]))
    with pytest.raises(KeyError):
        future.result(timeout=10)
    executor.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)])).result(
        timeout=10
    )


def test_with_overlap_execute_does_not_wait(executor):
    go = threading.Event()
    threads = []
    forward = executor.runner.model.forward

    def slow(*args, **kwargs):
        threads.append(threading.current_thread())
        assert go.wait(10 if overlaps(executor) else 0.01) or not overlaps(executor)
        return forward(*args, **kwargs)

    executor.runner.model.forward = slow
    future = executor.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
    assert future.done() == (not overlaps(executor))
    go.set()
    assert future.result(timeout=10).token_ids == [[next_token(PROMPT)]]
    assert (threads[0] is threading.current_thread()) == (not overlaps(executor))


def test_steps_run_in_the_order_of_the_calls(executor):
    plans = [
        StepPlan(new=[new(0, PROMPT, [0, 1, 2])], scheduled=[row(0, 5)]),
        *[StepPlan(scheduled=[row(0, 1, start=5 + i)]) for i in range(4)],
    ]
    tokens = [*PROMPT]
    for future in [executor.execute(plan) for plan in plans]:
        [[token]] = future.result(timeout=10).token_ids
        assert token == next_token(tokens)
        tokens.append(token)


def test_the_warm_up_leaves_no_sequence_behind(executor):
    executor.warm_up()
    assert executor.runner._batch.row_of == {}
    assert (
        executor.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)]))
        .result(timeout=10)
        .errors
        == {}
    )


def test_a_model_whose_logits_are_not_finite_is_refused_in_the_warm_up(executor):
    executor.runner.model.compute_logits = lambda hidden_states: torch.full(
        (len(hidden_states), 32), torch.nan
    )
    with pytest.raises(
        CheckpointError, match="cannot draw a first token: the model's logits are not finite"
    ):
        executor.warm_up()


def test_a_row_s_error_is_a_result(executor):
    result = executor.execute(StepPlan(new=[new(0, [NAN], [0])], scheduled=[row(0, 1)])).result(
        timeout=10
    )
    assert list(result.errors) == [0]


def test_it_sees_the_host_s_memory(executor):
    assert 0 < executor.free_memory() <= executor.free_host_memory() + 2**30
    assert executor.runner.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("memory", "num_blocks", "runs"),
    [("0.5", None, True), ("64MiB", None, False), ("auto", None, False), ("0.5", 9, False)],
)
def test_a_share_of_the_memory_is_of_what_the_largest_step_leaves(
    monkeypatch, memory, num_blocks, runs
):
    steps = []
    compute_logits = SumModel.compute_logits

    def greedy_for_memory(self, hidden_states):
        steps.append(len(hidden_states))
        torch.ones(2**26)
        return compute_logits(self, hidden_states)

    monkeypatch.setattr(SumModel, "compute_logits", greedy_for_memory)
    executor = InProcessExecutor(
        make_config(kv_cache_memory=memory, num_kv_blocks=num_blocks), make_plugins()
    )
    executor.load()
    assert steps == ([4] if runs else []), "all sequences that a step may have draw a token"
    assert (executor._step_memory > 0.9 * 2**28) == runs
    # The executor's memory is gone.
    [specs] = executor.kv_cache_specs()
    executor.init_kv_cache([plan_groups(specs, executor.backends()).sized([8], [0])])
    result = executor.execute(StepPlan(new=[new(0, PROMPT, [0, 1])], scheduled=[row(0, 5)])).result(
        timeout=10
    )
    assert result.token_ids == [[next_token(PROMPT)]] and list(executor.runner._batch.row_of) == [0]
    executor.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device, expected", [("cuda:1", 1), ("cuda", 0)])
def test_all_that_a_runner_does_is_on_its_gpu(monkeypatch, overlap, device, expected):
    """Kernels may be launched on the thread's current one."""
    seen = []

    class Runner:
        def __init__(self, config, plugins) -> None:
            self.device = torch.device(config.device.device)

        def __getattr__(self, name):
            return lambda *args: seen.append((name, CurrentDevice.now()))

    monkeypatch.setattr(torch.cuda, "device", CurrentDevice)
    monkeypatch.setattr(in_process, "ModelRunner", Runner)
    for name in ("profile", "warm_up"):
        monkeypatch.setattr(in_process, name, lambda runner, name=name: getattr(runner, name)())
    executor = InProcessExecutor(make_config(device=device, overlap=overlap), make_plugins())
    executor.load()
    executor.init_kv_cache([None])
    executor.warm_up()
    for _ in range(2):
        executor.execute(StepPlan(scheduled=[])).result(timeout=10)
        executor.warm_up()
    executor.shutdown()
    names = ["load", "profile", "init_kv_cache", "warm_up", *["execute", "warm_up"] * 2]
    assert [one for one in seen if one[0] != "shutdown"] == [(name, expected) for name in names]
    assert CurrentDevice.now() == 0, "the host program has its own again"


def test_shutdown_twice(executor):
    executor.shutdown()
    executor.shutdown()
    assert not hasattr(executor.runner, "model"), "it has let go of the model"
