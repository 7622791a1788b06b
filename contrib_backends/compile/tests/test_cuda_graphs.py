"""CUDA graphs on a GPU: PyTorch's capture. What is around it is tested everywhere, in
test_graphs.py."""

from __future__ import annotations

import pytest
import torch
from test_graphs import folder, make_llm, run, runner_of
from toolkit_lm_compile.graphs import CudaRecorder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU is here: CUDA graphs can be captured on one alone"
)
__all__ = ["folder"]


def test_a_graph_launches_again_what_was_recorded():
    recorder = CudaRecorder(torch.device("cuda"))
    given = torch.ones(4, device="cuda")
    found = torch.zeros(4, device="cuda")
    calls = []

    def work():
        calls.append(1)
        found.copy_(2 * given + 1)

    replay = recorder.record(work)
    assert len(calls) == 2, "once to warm up, once to capture"
    for value in (3.0, 5.0):
        given.fill_(value)
        replay()
        assert found.tolist() == [2 * value + 1] * 4
    assert len(calls) == 2


def test_graphs_are_captured_anew_after_a_trial():
    recorder = CudaRecorder(torch.device("cuda"))
    found = torch.zeros(4, device="cuda")
    replay = recorder.record(lambda: found.add_(0).fill_(1))
    del replay
    recorder.forget()
    recorder.free_memory()
    replay = recorder.record(lambda: found.fill_(2))
    found.zero_()
    replay()
    assert found.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("mode", "attention"),
    [
        ("piecewise", "sdpa"),
        ("full_and_piecewise", "decode"),
        ("full_and_piecewise", "triton"),
        ("full_and_piecewise", "uniform"),
        ("full", "static"),
        ("full", "sdpa"),
    ],
)
def test_an_engine_with_graphs_gives_what_one_without_gives(folder, mode, attention):
    expected = run(
        make_llm(folder, "none", attention, options={"device": "cuda", "optimization_level": 0})
    )
    # A share of the memory: the graphs are estimated, and the cache is made twice.
    for options in (
        {"device": "cuda"},
        {"device": "cuda", "num_kv_blocks": None, "kv_cache_memory": "0.01"},
    ):
        llm = make_llm(folder, mode, attention, options=options)
        graphs = runner_of(llm).compiler.graphs
        assert run(llm)[0] == expected[0]
        assert sum(count for kind, count in graphs.num_replays.items() if kind != "none")


@pytest.mark.slow
def test_parts_of_inductor_in_graphs(folder, tmp_path):
    expected = run(make_llm(folder, "none", options={"device": "cuda", "optimization_level": 0}))
    llm = make_llm(
        folder, "piecewise", options={"device": "cuda"}, backend="inductor", cache_dir=str(tmp_path)
    )
    assert run(llm)[0] == expected[0]
