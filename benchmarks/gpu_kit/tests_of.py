"""The tests that need a card, and jobs that run them. `tests/test_gpu_kit.py` finds those that are
not here."""

from __future__ import annotations

import json
import os

from gpu_kit.jobs import Job
from gpu_kit.pytest_lines import FIRST, SELECT

KITS = {
    "contrib_backends/sdpa/tests/test_sdpa_kit.py": "OnAGpu",
    "contrib_backends/flash_attn/tests/test_flash_attn_kit.py": "TestFlashAttn",
    "contrib_backends/triton/tests/test_triton_kit.py": "",
    "contrib_backends/triton/tests/test_triton_kernels.py": "",
    "contrib_backends/triton/tests/test_triton_quantized.py": "",
    "contrib_backends/triton/tests/test_triton_low_rank.py": "",
    "contrib_backends/triton/tests/test_triton_states.py": "",
    "contrib_backends/triton/tests/test_triton_engine.py": "",
    "tests/test_parity_llama.py": "OnCuda",
    "tests/test_attention_masks.py": "cuda",
}
"""Word in the names of a file's tests, or "" for all, by file. The last files have the most tests:
if
time runs out, theirs are cut."""
GRAPHS = {
    "contrib_backends/compile/tests/test_cuda_graphs.py": "",
    "contrib_backends/triton/tests/test_triton_graphs.py": "on_a_gpu",
}
OTHERS = {
    "contrib_backends/flex/tests/test_kit.py": "OnAGpu",
    "contrib_backends/flashinfer/tests/test_flashinfer_kit.py": "TestFlashInfer",
    "contrib_backends/flashinfer/tests/test_flashinfer_graphs.py": "",
    "contrib_backends/flashinfer/tests/test_flashinfer_backend.py": "",
    "contrib_backends/xformers/tests/test_xformers_kit.py": "TestXformers",
}
"""Test files of backends with lower priority."""
WORKERS = 12
FIRST_OF_A_DRY_RUN = 2
"""Tests of each file."""


def job(
    name: str,
    files: dict[str, str],
    *,
    quick: bool,
    workers: int = WORKERS,
    marks: str = "not nightly",
) -> Job:
    """pytest on files, in processes side by side: compilers keep them busy."""
    environ = {SELECT: json.dumps(files)} | ({FIRST: str(FIRST_OF_A_DRY_RUN)} if quick else {})
    # Warnings of other versions than the project's are not faults.
    options = (
        "-q",
        "--timeout",
        "60",
        "-p",
        "no:cacheprovider",
        "-p",
        "gpu_kit.pytest_lines",
        "-o",
        "filterwarnings=default",
    )
    count = min(workers, os.cpu_count() or 1)
    spread = ("-n", str(count), "--dist", "load")
    return Job(name, ("-m", "pytest", *spread, *options, "-m", marks, *files), environ, ends=False)
