"""`benchmarks/gpu.py --quick`: each case runs or says why it does not, in one table. Nothing is timed here."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def run(*arguments, timeout=240):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=timeout)


def test_one_table_tells_what_ran_and_what_did_not():
    done = run("--quick", "--only", "sdpa,flash_attn,nobody")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^cpu, torch \S+: copies [\d.,]+ GB/s, products [\d.,]+ TFLOP/s$", done.stdout, re.MULTILINE)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ") and "---" not in line]
    header, *rows = rows
    assert header == ["backend", "graphs", "start", "decode, 1 row", "decode, 4 rows", "prefill, 2 x 32"]
    ran = [row for row in rows if row[0] == "sdpa"]
    assert [row[1] for row in ran] == ["no", "none, the device has none"]
    for _, _, start, one, many, prefill in ran:
        assert re.fullmatch(r"[\d.]+ s", start)
        for cell in (one, many):
            assert re.fullmatch(r"[\d.]+ ms, [\d,]+ tokens/s, \d+%", cell)
        assert re.fullmatch(r"[\d,]+ tokens/s, \d+%", prefill)
    refused = [row for row in rows if row[0] == "flash_attn"]
    assert [row[1] for row in refused] == ["no", "yes"]
    assert all(row[2].startswith("skipped: ") and "flash_attn" in row[2] for row in refused)
    assert len(rows) == 4


def test_what_the_seconds_do_not_suffice_for_is_told():
    done = run("--quick", "--only", "sdpa,flashinfer", "--seconds", "14")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("skipped: no time was left") == 4


@pytest.fixture(scope="module")
def gpu():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_benchmark"] = module
    spec.loader.exec_module(module)
    return module


def test_each_backend_that_is_known_is_in_the_table(gpu, monkeypatch):
    assert [(name, reason) for name, graphs, reason in gpu.cases(gpu.QUICK, None) if graphs == "yes"] == [
        (name, None) for name in ("sdpa", "flash_attn", "xformers", "triton", "flashinfer", "flex")
    ]
    monkeypatch.setattr(gpu, "KNOWN", ("sdpa", "not_there"))
    missing = "not installed: pip install toolkit-lm-not-there"
    assert list(gpu.cases(gpu.QUICK, "not_there")) == [("not_there", "no", missing), ("not_there", "yes", missing)]


@pytest.mark.parametrize(("rows", "keys"), [(1, 0), (64, 100)])
def test_a_decode_step_reads_weights_keys_and_values(gpu, rows, keys):
    # As in the model card of Llama 3 8B: 8.03 B parameters, of which 0.53 B are the embedding, which a step does not read.
    weights = gpu.FULL.product_weights + 2 * gpu.FULL.vocab_size * gpu.FULL.hidden
    assert round(weights / 1e9, 2) == 8.03
    cached = rows * keys * 2 * 32 * 8 * 128
    assert gpu.FULL.decode_bytes(rows, keys) == 2 * (weights - gpu.FULL.vocab_size * gpu.FULL.hidden + cached)
