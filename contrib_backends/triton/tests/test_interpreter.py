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


def interpret(*arguments: str) -> None:
    """Runs tests of this folder, all of which must pass, and none be skipped."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
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


FEW_KERNELS = "row_without_keys or large_scores or many_scores or rotated_into or gated_layer"
FEW_GRAPHS = "(launch and plain)"


def test_some_kernels() -> None:
    interpret("test_triton_kernels.py", "-k", FEW_KERNELS)


def test_a_decode_in_a_graph() -> None:
    interpret("test_triton_graphs.py", "-k", FEW_GRAPHS)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_other_graphs() -> None:
    interpret("test_triton_graphs.py", "-k", f"not on_a_gpu and not {FEW_GRAPHS}")


@pytest.mark.slow
def test_other_kernels() -> None:
    interpret("test_triton_kernels.py", "-k", f"not ({FEW_KERNELS})")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kit", ["TestTriton", "TestTritonKernels"])
def test_conformance(kit) -> None:
    interpret(f"test_triton_kit.py::{kit}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_engine() -> None:
    interpret("test_triton_engine.py")
