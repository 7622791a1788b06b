"""Measures the cost of the transformers fallback's proof: the start of a Llama of 153 M
parameters, with and without it.

usage: python benchmarks/fallback.py [--runs 5] [--dtypes bfloat16 float32]

Each start is a process of its own, from its first instruction to an engine that is ready; both
kinds take turns. The last column is what the proof adds, as a share of the start without it: of the
medians.

Predicted, on two cores with nothing else to do: 3.5% in float32 (a step and a forward pass more),
4% in bfloat16 (one more in float32). Came, on two cores of Zen 5: 4.1% in float32 (3.47 to 3.61 s),
4.1% and 5.3% in bfloat16 (3.67 to 3.82 s, 3.56 to 3.75 s).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from checkpoints import make_llama_160m

START = """
import sys, time
begun = time.monotonic()
from toolkit_lm import LLM
folder, dtype, verify = sys.argv[1:]
LLM(
    folder,
    model_impl="transformers",
    dtype=dtype,
    max_model_len=512,
    max_num_seqs=8,
    num_kv_blocks=64,
    verify_fallback=verify == "True",
)
print(time.monotonic() - begun)
"""


def start(folder: Path, dtype: str, verify: bool) -> float:
    """Seconds of one start."""
    command = [sys.executable, "-W", "ignore", "-c", START, str(folder), dtype, str(verify)]
    return float(
        subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=600
        ).stdout.split()[-1]
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure(make_llama_160m(Path(name)), args.dtypes, args.runs)


def measure(folder: Path, dtypes: list[str], runs: int) -> None:
    print("| dtype | without, s | with, s | added |\n| --- | --- | --- | --- |")
    for dtype in dtypes:
        found: dict[bool, list[float]] = {False: [], True: []}
        start(folder, dtype, True)
        for _ in range(runs):
            for verify in found:
                found[verify].append(start(folder, dtype, verify))
        without = median(found[False])
        proven = median(found[True])
        print(
            f"| {dtype} | {without:.2f} | {proven:.2f} | {(proven - without) / without:+.1%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
