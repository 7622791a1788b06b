"""Measures the gain of planning a step while the one before is computed (option `overlap`): runs
interleaved (A B A B), medians.

usage: python benchmarks/overlap.py [--runs 3] [--only mixed,W1] [--model FOLDER] [--processes
no,yes]

The workloads are those of offline.py, the model is of its 160M shape. `processes`: the engine in
this process, in one of its own, or both in turn.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import make_llama_160m
from offline import BATCH, Workload, workload
from toolkit_lm import LLM, SamplingParams


def seconds(llm: LLM, work: Workload) -> float:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in work]
    start = time.perf_counter()
    llm.generate([{"prompt_token_ids": prompt} for prompt, _ in work], params, use_tqdm=False)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default="mixed")
    parser.add_argument("--processes", default="no,yes")
    parser.add_argument(
        "--model", type=Path, help="a checkpoint of the 160M shape; default: made now"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_llama_160m(args.model or Path(folder))
        for process in args.processes.split(","):
            compare(model, process == "yes", args.only.split(","), args.runs)


def compare(model: Path, engine_process: bool, names: list[str], runs: int) -> None:
    options: dict[str, Any] = {
        "max_model_len": 1024,
        "max_num_seqs": BATCH,
        "kv_cache_memory": "1GiB",
        "engine_process": engine_process,
    }
    with (
        LLM(str(model), overlap=False, **options) as without,
        LLM(str(model), overlap=True, **options) as overlapping,
    ):
        systems = {"one after another": without, "overlapping": overlapping}
        for llm in systems.values():
            seconds(llm, workload("W1", 1)[:4])
        for name in names:
            times: dict[str, list[float]] = {system: [] for system in systems}
            for run in range(runs):
                for system, llm in systems.items():
                    times[system].append(seconds(llm, workload(name, 100 + run)))
            tokens = sum(n for _, n in workload(name, 0))
            rates = {system: tokens / statistics.median(values) for system, values in times.items()}
            place = "a process of its own" if engine_process else "this process"
            print(
                f"{name}, engine in {place}: "
                + ", ".join(
                    f"{system} {rate:.0f} output tokens/s" for system, rate in rates.items()
                ),
                end="; ",
            )
            print(
                f"ratio {rates['overlapping'] / rates['one after another']:.3f}; runs {times}",
                flush=True,
            )


if __name__ == "__main__":
    main()
