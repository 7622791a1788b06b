"""Some seconds of benchmarks/soak.py: mixed random load, a pool that is far too small, and nothing
left of it at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, SOAK, *arguments, "--seed", "1"],
        capture_output=True,
        text=True,
        timeout=280,
        env=environ,
    )


@pytest.mark.slow
def test_a_short_soak():
    done = soak("--minutes", "0.1", "--jobs", "25")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {
        tuple(line[:56].split(maxsplit=1)): line[56:]
        for line in done.stdout.splitlines()
        if line[:1].strip()
    }
    assert {kind for kind, *_ in rows} >= {"good", "sampled", "hang-up", "bad", "deadline"}, (
        done.stdout
    )


@pytest.mark.nightly
def test_a_short_soak_under_attack():
    done = soak("--minutes", "0.2", "--jobs", "10", "--attackers", "3")
    shown, _, violations = done.stdout.partition("\nviolations ")
    assert "attacked / alone" in shown and "unknown fields" in shown, done.stdout + done.stderr
    # How much slower it gets in some seconds says more of the machine.
    assert [
        line for line in violations.splitlines()[1:] if "p99 of small requests" not in line
    ] == [], done.stdout
