"""Measures the first token of a long prefix: cold, warm on the device, evicted to the host, and
restored from disk by another engine.

usage: python benchmarks/kv_tiers.py [--model FOLDER] [--tokens 6000] [--rounds 3]

The model is m1 of race.py, a Llama of 153 M parameters, unless FOLDER names another.

Each round has prefixes of its own. *Restored* is measured in an engine that was started anew, with
the files in the system's page cache; drop that between both engines to measure the disk. Engines
whose device has room for one prefix have answered another one before: memory that a process uses
for the first time costs the system time, whoever writes it. Shown is the median over the rounds.
Figures count only on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints import make_llama_160m
from toolkit_lm import LLM, SamplingParams

_ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def main() -> None:
    """Prints a line for each state of the prefix."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=6000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    generator = random.Random(0)
    prompts = [
        [generator.randrange(100, 200) for _ in range(options.tokens)]
        for _ in range(options.rounds + 1)
    ]
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = str(make_llama_160m(Path(folder) / "m1", options.tokens + 64))
        found = measure(options, prompts, Path(folder) / "kv")
    base = found["warm"]
    print(f"{options.tokens} tokens; seconds to the first token")
    for state, seconds in found.items():
        of_cold = seconds / found["cold"]
        print(f"{state:10}{seconds:10.4f}{seconds / base:8.2f} times warm{of_cold:8.3f} of cold")
    print("goal of restored: 1.3 times warm, 0.2 of cold")


def measure(
    options: argparse.Namespace, prompts: Sequence[list[int]], folder: Path
) -> dict[str, float]:
    """Median seconds by state."""
    found = {}
    other, *prompts = prompts
    with engine(options, {"dir": str(folder)}) as llm:
        median(llm, [other])
        found["cold"] = median(llm, prompts)
        found["warm"] = median(llm, prompts)
    with engine(options, {"dir": str(folder)}, prompts_on_device=1) as llm:
        median(llm, [other])
        found["restored"] = median(llm, prompts)
    with engine(options, {"host": "16GiB"}, prompts_on_device=1) as llm:
        median(llm, [other, *prompts])
        found["host"] = median(llm, prompts)
    return found


def engine(options: argparse.Namespace, own: Any, prompts_on_device: int | None = None) -> LLM:
    """An engine whose device has room for so many prompts; None: for all."""
    count = options.rounds + 2 if prompts_on_device is None else prompts_on_device
    return LLM(
        options.model,
        max_model_len=options.tokens + 16,
        max_num_seqs=1,
        num_kv_blocks=count * (options.tokens // 16 + 2),
        plugin_option={"kv_disk": own},
    )


def median(llm: LLM, prompts: Sequence[list[int]]) -> float:
    """Median seconds to the first token, one prompt after the other."""
    seconds = []
    for prompt in prompts:
        start = time.perf_counter()
        [output] = llm.generate([{"prompt_token_ids": prompt}], _ONE, use_tqdm=False)
        assert output.error is None, output.error
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
