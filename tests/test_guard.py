"""`benchmarks/guard.py`: a decode step takes what it took, and what is counted is what a step
does."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "guard.py"


@pytest.fixture(scope="module")
def guard():
    spec = importlib.util.spec_from_file_location("guard", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_decode_step_takes_no_more_than_it_did(guard):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.count("rows 1, ") == done.stdout.count("rows 8, ") == len(guard.FIGURES[1]) - 1
    ), done.stdout


def test_what_a_step_does_is_counted(guard):
    kept = []

    def step():
        torch.empty(1000)
        bytearray(1 << 20)
        kept.extend(object() for _ in range(10))

    # A measurement does the same: earlier garbage is collected first.
    gc.collect()
    gc.disable()
    try:
        found = guard.measure(step)
    finally:
        gc.enable()
    assert (
        found["torch operations"],
        found["torch allocations"],
        found["torch memory, bytes"],
    ) == (1, 1, 4000)
    assert found["Python memory, bytes"] == pytest.approx(1 << 20, rel=0.01)
    assert found["Python allocations left"] == pytest.approx(10, abs=2)
    # Calls of the step, torch.empty and list.extend, and 11 of the generator. Calls of types are
    # not seen; the end of the profile is.
    assert found["Python calls"] == pytest.approx(14, abs=1)


def test_a_figure_that_is_over_by_more_than_the_tolerance_is_named(guard):
    assert list(guard.over({"a": 107, "b": 107.1}, {"a": 100, "b": 100})) == [
        "b: 107.1 is over 100.0 by more than 5% and 2"
    ]
