"""Measures a decode step in figures that do not depend on the machine: Python calls, Python
memory, torch operations, torch memory.

usage: python benchmarks/guard.py [--check] [--instructions]

The embedded model `tiny` decodes in this process, in float32, in plain torch and with `sdpa`, which
compute alike on all processors: 1 row, and 8 rows. Figures are means of 16 steps, as many as a
block has tokens, after a warm-up. They are compared with those in this file, which were taken with
Python 3.11 and the versions of constraints.txt. `--check`: exit code 1 where one is over its figure
by more than the tolerance. One that is under it by more deserves a new figure. `--instructions`
counts instructions too, in one minute of CPU time, by valgrind, whose processor has AVX2 and no
AVX-512; it needs a C compiler and valgrind's headers.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from types import FrameType

import torch
from toolkit_lm import LLM, SamplingParams

TOLERANCE = 0.05
SLACK = 2
"""A figure may be over by this share, and by this many."""
FIGURES: dict[int, dict[str, float]] = {
    1: {
        "Python calls": 1_320,
        "Python memory, bytes": 13_900,
        "Python allocations left": 3,
        "torch operations": 1_245,
        "torch allocations": 250,
        "torch memory, bytes": 291_300,
        "instructions": 7_480_000,
    },
    8: {
        "Python calls": 1_777,
        "Python memory, bytes": 26_100,
        "Python allocations left": 14,
        "torch operations": 1_278,
        "torch allocations": 256,
        "torch memory, bytes": 2_351_500,
        "instructions": 14_560_000,
    },
}
"""Figures of a step, by number of rows."""

WARMUP = 16
STEPS = 16
COLLECTOR = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void stop(void) { CALLGRIND_STOP_INSTRUMENTATION; CALLGRIND_DUMP_STATS; }
"""

Step = Callable[[], object]


@contextmanager
def decode(rows: int) -> Iterator[Step]:
    """A decode step of so many rows."""
    params = SamplingParams(max_tokens=WARMUP + 10 * STEPS, temperature=0, ignore_eos=True)
    with LLM(model="tiny", dtype="float32", kernels="torch", attention_backend="sdpa") as llm:
        for row in range(rows):
            llm.engine.add_request(str(row), "Once upon a time", params)
        for _ in range(WARMUP):
            llm.engine.step()
        gc.collect()
        gc.disable()
        try:
            yield llm.engine.step
        finally:
            gc.enable()


def measure(step: Step) -> dict[str, float]:
    return count_calls(step) | measure_memory(step) | profile_torch(step) | count_left(step)


def count_calls(step: Step) -> dict[str, float]:
    """Calls of Python functions, and of C functions from Python."""
    calls = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        for _ in range(STEPS):
            step()
    finally:
        sys.setprofile(None)
    return {"Python calls": calls / STEPS}


def measure_memory(step: Step) -> dict[str, float]:
    """Python's: the most that a step has beside what was there before."""
    peaks = []
    tracemalloc.start()
    try:
        for _ in range(STEPS):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            step()
            peaks.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
    return {"Python memory, bytes": mean(peaks)}


def profile_torch(step: Step) -> dict[str, float]:
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        for _ in range(STEPS):
            step()
    events = profile.kineto_results.events()
    sizes = [
        event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0
    ]
    operations = sum(event.name().startswith("aten::") for event in events)
    return {
        "torch operations": operations / STEPS,
        "torch allocations": len(sizes) / STEPS,
        "torch memory, bytes": sum(sizes) / STEPS,
    }


def count_left(step: Step) -> dict[str, float]:
    """The least of three counts: what the interpreter keeps once is in one of them, what a step
    leaves is in all."""
    counts = []
    for _ in range(3):
        before = sys.getallocatedblocks()
        for _ in range(STEPS):
            step()
        counts.append((sys.getallocatedblocks() - before) / STEPS)
    return {"Python allocations left": min(counts)}


def count_instructions() -> dict[int, dict[str, float]]:
    """Instructions by number of rows. Raises CalledProcessError or FileNotFoundError if the tools
    are missing."""
    with TemporaryDirectory() as folder:
        source = Path(folder, "collector.c")
        library = Path(folder, "collector.so")
        out = Path(folder, "out")
        source.write_text(COLLECTOR)
        subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        valgrind = [
            "valgrind",
            "--quiet",
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={out}",
        ]
        command = [*valgrind, sys.executable, __file__, "--collector", str(library)]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": "0"})
        texts = [Path(f"{out}.{number}").read_text() for number, _ in enumerate(FIGURES, 1)]
    totals = [int(re.search(r"^totals: (\d+)", text, re.MULTILINE)[1]) for text in texts]
    return {
        rows: {"instructions": total / STEPS} for rows, total in zip(FIGURES, totals, strict=True)
    }


def run_collected(library: str) -> None:
    """Under valgrind: the steps alone are counted, one dump for each number of rows."""
    collector = ctypes.CDLL(library)
    for rows in FIGURES:
        with decode(rows) as step:
            collector.start()
            for _ in range(STEPS):
                step()
            collector.stop()


def over(found: dict[str, float], figures: dict[str, float]) -> Iterator[str]:
    """Figures that are exceeded by more than the tolerance."""
    for name, value in found.items():
        if value > figures[name] * (1 + TOLERANCE) + SLACK:
            yield (
                f"{name}: {value:,.1f} is over {figures[name]:,.1f} by more than {TOLERANCE:.0%} "
                f"and {SLACK}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    parser.add_argument("--collector", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.collector:
        run_collected(args.collector)
        return 0
    # Kineto would log each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    instructions = count_instructions() if args.instructions else {}
    problems = []
    for rows, figures in FIGURES.items():
        with decode(rows) as step:
            found = measure(step) | instructions.get(rows, {})
        for name, value in found.items():
            print(f"rows {rows}, {name}: {value:,.1f}, {value / figures[name] - 1:+.1%}")
        problems += [f"rows {rows}, {problem}" for problem in over(found, figures)]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return int(args.check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
