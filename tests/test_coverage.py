"""`benchmarks/coverage.py`: no class of transformers runs worse than its committed result."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "coverage.py"


def check_coverage(*options):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--check", *options],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal of built" in done.stdout


@pytest.mark.slow
def test_no_class_of_a_sample_is_worse():
    check_coverage("--sample", "15")


@pytest.mark.nightly
def test_no_class_is_worse():
    check_coverage("--jobs", "2")
