"""Measures the machine's limits, as JSON: bytes read a second, and FLOP/s of bf16 and fp32
matrix products.

usage: python benchmarks/machine_limits.py [--turns]

Reads are those of 512 MB in huge pages, by all of torch's threads, in the best of three ways of
reading. Products are of 2048 x 2048 matrices with prepacked weights, as oneDNN does them best. Each
is the best of several tries: a limit, and no average. With --turns they are measured for each line
on stdin, as a system of race.py.
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable

import torch

ARENA_BYTES = 512 << 20
COLUMNS = 4096
SIDE = 2048
TRIES = 8


def best(work: Callable[[], object]) -> float:
    """Seconds."""
    times = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return min(times)


def read_rate() -> float:
    arena = mmap.mmap(-1, ARENA_BYTES)
    arena.madvise(mmap.MADV_HUGEPAGE)
    floats = torch.frombuffer(arena, dtype=torch.float32).fill_(1)
    rows = floats.view(-1, COLUMNS)
    vector = torch.ones(COLUMNS)
    ways = [floats.sum, floats.max, lambda: rows.mv(vector)]
    return ARENA_BYTES / min(map(best, ways))


def matrix_rate(dtype: torch.dtype) -> float:
    x, weight = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    return (
        2
        * SIDE**3
        / best(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    )


def limits() -> dict[str, float]:
    return {
        "read": read_rate(),
        "bf16": matrix_rate(torch.bfloat16),
        "fp32": matrix_rate(torch.float32),
    }


def main() -> None:
    if sys.argv[1:] != ["--turns"]:
        print(json.dumps(limits()))
        return
    print(
        "ready", json.dumps({"first": time.monotonic(), "version": torch.__version__}), flush=True
    )
    for _ in sys.stdin:
        print("took", json.dumps(limits()), flush=True)


if __name__ == "__main__":
    main()
