"""Decodes in CUDA graphs: with PyTorch's capture on a GPU; by Triton's interpreter, with which
`test_interpreter.py` runs this, with what stands for a graph.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_graphs import ROWS, FixedSteps, generate, make_model
from test_graphs import FakeRecorder
from toolkit_lm_compile import graphs as graphs_module
from toolkit_lm_compile.dispatch import Kind
from toolkit_lm_devkit.attention_step import OffsetTable
from toolkit_lm_triton.backend import TritonBackend
from toolkit_lm_triton.device import interprets, refusal
from toolkit_lm_triton.pieces import SPLIT

DEVICE = "cpu" if interprets() else "cuda"
pytestmark = pytest.mark.skipif(
    refusal(DEVICE, "float32") is not None, reason=str(refusal(DEVICE, "float32"))
)
interpreted = pytest.mark.skipif(not interprets(), reason="it stands for a graph on a CPU")
MADE = {"attend": ("partial", "stats"), "merge": (0, 1)}
"""Arguments of kernels that are memory of the graph's own."""


class Launches:
    """The kernels; of each launch, all that a graph would hold: the programs, numbers and
    addresses."""

    def __init__(self, kernels: Any) -> None:
        self.seen: list[Any] = []
        self.kernels = kernels

    def __getattr__(self, name: str) -> Any:
        return Launcher(self, name, getattr(self.kernels, name))


class Launcher:
    def __init__(self, launches: Launches, name: str, kernel: Any) -> None:
        self.launches = launches
        self.name = name
        self.kernel = kernel

    def __getitem__(self, programs: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            given = {**dict(enumerate(arguments)), **options}
            held = {
                name: address(one)
                for name, one in given.items()
                if name not in MADE.get(self.name, ())
            }
            self.launches.seen.append((self.name, programs, held))
            self.kernel[programs](*arguments, **options)

        return launch


def address(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.data_ptr(), tuple(argument.shape), argument.stride(), argument.dtype


class ByOffset(OffsetTable):
    def naive(self, head: int, query: int, key: int) -> float:
        return float(self(torch.tensor([query]), torch.tensor([key]))[head])


@interpreted
@pytest.mark.parametrize(
    ("features", "most"),
    [
        ({}, 64),
        ({"window": 6, "soft_cap": 2.0}, 64),
        ({"window": 40}, 64),
        ({"bias": ByOffset(4)}, 64),
        ({"sinks": torch.arange(4.0)}, 2 * SPLIT),
    ],
    ids=["plain", "window", "long window", "bias", "keys that programs share"],
)
def test_later_steps_launch_what_the_recorded_one_launched(features, most) -> None:
    """`build` fills tensors at the same addresses, with room for the longest rows, and leaves
    nothing of longer steps in them."""
    steps = FixedSteps(TritonBackend, **{"window": None, "most": most, **features})
    launches = steps.backend._kernels = Launches(steps.backend._kernels)
    # The same as before a capture.
    steps.run([2, 0, 0, 0])
    launches.seen.clear()
    recorded = steps.run([9, 0, 0, 0]), launches.seen.copy()
    assert {name for name, *_ in launches.seen} == {
        "store_kv",
        "attend",
        *(["merge"] if most > SPLIT else []),
    }
    for lengths in ([most] * ROWS, [10, 2, 30, 0], [3, 0, 0, 0]):
        launches.seen.clear()
        assert (steps.run(lengths), launches.seen) == recorded


@pytest.fixture(scope="module", params=[None, 12], ids=["no window", "window"])
def folder(request, tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), request.param)


# A window is what could make a step's programs differ.
@interpreted
@pytest.mark.parametrize(
    "folder",
    [pytest.param(None, id="no window", marks=pytest.mark.nightly), pytest.param(12, id="window")],
    indirect=True,
)
def test_steps_in_graphs_give_what_steps_without_give(folder, monkeypatch) -> None:
    recorder = FakeRecorder()
    monkeypatch.setattr(graphs_module, "make_recorder", lambda device: recorder)
    found, counts = generate(folder, "full_and_piecewise", "triton")
    assert found == generate(folder, "none", "sdpa")[0]
    assert counts[Kind.FULL] and counts[Kind.PIECEWISE], (
        "of decodes the whole step, of others the parts beside attention"
    )
    assert recorder.num_replays


@pytest.mark.skipif(interprets(), reason="it needs a GPU")
def test_on_a_gpu(folder) -> None:
    expected, _ = generate(folder, "none", "triton", device="cuda")
    found, counts = generate(folder, "full_and_piecewise", "triton", device="cuda")
    assert found == expected and counts[Kind.FULL]
