"""Decode steps in CUDA graphs: with the stand-in and what stands for a graph anywhere, with
FlashInfer and PyTorch's capture on a GPU."""

import pytest
from decode_graphs import MOST, ROWS, FixedSteps, generate, make_model
from flashinfer_stand_in import StandIn, StandInBackend
from test_graphs import FakeRecorder
from toolkit_lm_compile import graphs as graphs_module
from toolkit_lm_compile.dispatch import Kind
from toolkit_lm_flashinfer.backend import missing


@pytest.mark.parametrize("window", [None, 6, 40])
def test_later_steps_read_where_the_recorded_one_read(window) -> None:
    """`plan` and `build` fill tensors at the same addresses, with room for the longest rows, and
    leave nothing of longer steps in them."""
    steps = FixedSteps(StandInBackend, window)
    recorded = steps.run([9, 0, 0, 0])
    for lengths in ([MOST] * ROWS, [10, 2, 30, 0], [17, 16, 1, 33], [3, 0, 0, 0]):
        assert steps.run(lengths) == recorded


@pytest.fixture(scope="module", params=[None, 12], ids=["no window", "window"])
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), request.param)


def test_steps_in_graphs_give_what_steps_without_give(folder, monkeypatch) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(graphs_module, "make_recorder", lambda device: recorder)
    expected, _ = generate(folder, "none", "sdpa")
    assert generate(folder, "none", "stand_in", [StandIn()])[0] == expected
    found, counts = generate(folder, "full_and_piecewise", "stand_in", [StandIn()])
    assert found == expected
    assert counts[Kind.FULL] and counts[Kind.PIECEWISE], (
        "of decodes the whole step, of others the parts beside attention"
    )
    assert recorder.num_replays


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_on_a_gpu(folder) -> None:
    options = {"device": "cuda", "dtype": "bfloat16"}
    expected, _ = generate(folder, "none", "flashinfer", **options)
    found, counts = generate(folder, "full_and_piecewise", "flashinfer", **options)
    assert found == expected and counts[Kind.FULL]
