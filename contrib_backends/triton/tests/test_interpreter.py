"""The kernels on a CPU, by Triton's interpreter. It is chosen when Triton is imported, so that
these tests have processes of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from toolkit_lm_triton.device import interprets

FOLDER = Path(__file__).parent
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
    ),
    pytest.mark.skipif(interprets(), reason="this process interprets already"),
]


def interpret(*arguments: str, **environ: str) -> None:
    """Runs tests of this folder, all of which must pass, and none be skipped."""
    environment = os.environ | {"TRITON_INTERPRET": "1"} | environ
    # Triton 3.6 takes a number out of an array of one; numpy from 2.4 on gives none.
    warnings = ["-W", "error", "-W", "ignore:Conversion of an array with ndim:DeprecationWarning"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "-x",
        "-p",
        "no:cacheprovider",
        *warnings,
        *arguments,
    ]
    run = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    summary = run.stdout.strip().splitlines()[-1]
    assert "passed" in summary and "skipped" not in summary, summary


FEW = (
    "row_without_keys or large_scores or many_scores or rotated_into or (launch and plain) or "
    "rows_that_have_several or single_tokens or a_scan or (a_convolution and silu)"
)
"""Tests of kernels, and a decode in a graph."""
TESTS = (
    "test_triton_kernels.py",
    "test_triton_graphs.py",
    "test_triton_low_rank.py",
    "test_triton_states.py",
    "test_triton_quantized.py",
    "test_triton_kit.py",
    "test_triton_engine.py",
)


def test_some_kernels() -> None:
    interpret(*TESTS[:4], "-k", FEW, "-m", "not nightly")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_others() -> None:
    """In one process, since each imports torch and triton."""
    interpret(*TESTS, "-k", f"not on_a_gpu and not ({FEW})", "-m", "not nightly")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_those_for_the_night() -> None:
    interpret(*TESTS, "-m", "nightly")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_operations_with_many_rows() -> None:
    interpret("test_triton_kit.py::TestTritonKernels", TRITON_TESTS_WHOLE="1")
