"""Some seconds of benchmarks/soak.py: mixed random load, a pool that is far too small, and nothing left of it at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[1] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_a_short_soak():
    command = [sys.executable, SOAK, "--minutes", "0.15", "--jobs", "25", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {tuple(line[:56].split(maxsplit=1)): line[56:] for line in done.stdout.splitlines() if line[:1].strip()}
    assert {kind for kind, *_ in rows} >= {"good", "sampled", "hang-up", "bad", "deadline"}, done.stdout
