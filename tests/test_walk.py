"""`benchmarks/walk.py`: how far a request walks stays within its limits, and what is counted is
what runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toolkit_lm.errors import nearest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "walk.py"


@pytest.fixture(scope="module")
def walk():
    spec = importlib.util.spec_from_file_location("walk", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_request_walks_no_further_than_its_limits():
    command = [sys.executable, SCRIPT, "--check", "--verbose"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    files = [line.split()[-1] for line in done.stdout.splitlines() if line.endswith(".py")]
    assert {
        "core/src/toolkit_lm/frontend/llm.py",
        "core/src/toolkit_lm/frontend/async_llm.py",
    } < set(files)
    assert any(file.startswith("plugins/server/src/") for file in files)


def test_the_projects_calls_are_counted_but_for_those_that_are_left_out(walk):
    def left_out():
        nearest("a", ["b"])

    def measured():
        nearest("a", ["b"])
        nearest("a", ["b"])
        left_out()

    found = walk.count_calls(measured, without=[left_out.__code__])
    (name, count) = next(
        (function, count) for function, count in found.calls.items() if function.name == "nearest"
    )
    assert (name.file, count) == ("core/src/toolkit_lm/errors.py", 2)
    assert {function.file for function in found.calls} == {"core/src/toolkit_lm/errors.py"}
    assert found.num_all > found.calls.total()


def test_a_figure_over_its_limit_is_named(walk):
    assert list(walk.over({"files": (3, 3), "calls": (5, 4)})) == [
        "calls: 5 is over the limit of 4"
    ]
