"""Measures agents whose sessions take turns on a device with room for a quarter of them: with their
blocks kept in host memory, without, and with all prompts computed anew.

usage: python benchmarks/kv_agents.py [--model FOLDER] [--sessions 10] [--turns 6] [--rounds 5]

The model is m1 of race.py, a Llama of 153 M parameters, unless FOLDER names another.

All sessions begin with the same prompt of a system and its tools. A turn adds a tool's result and
an answer. While the tool of a session runs, the other sessions have their turns, in an order of
chance. Each turn is asked of all engines, one after the other, so that they meet the same machine.
*host* has four times the device's room in host memory. *reused* is the share of what an earlier
turn has computed that is found, and *cached* the share of all prompts.

The second table has the throughput of prompts and answers that nobody asks again, beside the
writing of all blocks to disk. Shown are medians. Figures count only on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints import make_llama_160m
from toolkit_lm import LLM, SamplingParams

_SHARED = 768
"""Tokens of the system and its tools."""
_RESULT = 96
"""Tokens of a tool's result."""
_ANSWER = 16
_BLOCK = 16
_HITS = 0.9
_FIRST_TOKEN = 0.25
_THROUGHPUT = 0.97
"""Goals."""


@dataclass
class Found:
    """Figures of an engine."""

    seconds: list[float] = field(default_factory=list)
    """To the first token of each turn."""
    cached: int = 0
    reusable: int = 0
    """Tokens that an earlier turn has computed, in whole blocks."""
    prompt: int = 0


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    longest = _SHARED + options.turns * (_RESULT + _ANSWER)
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            options.model = str(make_llama_160m(Path(folder) / "m1", longest + 64))
        agents(options, longest)
        throughput(options, Path(folder) / "kv")


def agents(options: argparse.Namespace, longest: int) -> None:
    """Prints the table of the agents' turns."""
    needed = _SHARED + options.sessions * (longest - _SHARED)
    # Few sessions: room for the longest of them at least.
    blocks = max(needed // _BLOCK // 4, longest // _BLOCK + 2)
    how = {"max_model_len": longest + _BLOCK, "max_num_seqs": 2, "num_kv_blocks": blocks}
    with ExitStack() as stack:
        none = stack.enter_context(LLM(options.model, **how))
        host = f"{4 * blocks * (block_bytes(none) + 64) // 1024}KiB"
        tier = {"plugin_option": {"kv_disk": {"host": host}}}
        engines = {
            "host": stack.enter_context(LLM(options.model, **how, **tier)),
            "none": none,
            "recompute": stack.enter_context(
                LLM(options.model, **how, enable_prefix_caching=False)
            ),
        }
        found = {name: Found() for name in engines}
        for llm in engines.values():
            ask(llm, [5] * 200)
            llm.reset_prefix_cache()
        for prompt, reusable in turns(options):
            for name, llm in engines.items():
                output = ask(llm, prompt)
                figures = found[name]
                figures.seconds.append(output.metrics.first_token_ts - output.metrics.arrival_time)
                figures.cached += output.num_cached_tokens
                figures.reusable += reusable
                figures.prompt += len(prompt)
    print(f"{options.sessions} sessions, {options.turns} turns, {needed} tokens; room for")
    print(f"{blocks * _BLOCK} on the device, and {host} on the host")
    print("           first token p50    reused    cached")
    for name, figures in found.items():
        median = statistics.median(figures.seconds)
        reused = figures.cached / figures.reusable
        print(f"{name:11}{median:13.4f} s{reused:12.1%}{figures.cached / figures.prompt:10.1%}")
    base = statistics.median(found["host"].seconds)
    for name in ("none", "recompute"):
        ratio = base / statistics.median(found[name].seconds)
        print(f"host to {name}: {ratio:.3f} (goal {_FIRST_TOKEN})")
    print(f"reused with host: goal {_HITS:.0%}")


def turns(options: argparse.Namespace) -> Iterator[tuple[list[int], int]]:
    """Yields each turn's prompt, and how many of its tokens an earlier turn has computed."""
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(100, 200) for _ in range(count)]

    shared = tokens(_SHARED)
    prompts = [list(shared) for _ in range(options.sessions)]
    known = 0
    for turn in range(options.turns):
        for session in generator.sample(range(options.sessions), options.sessions):
            prompt = prompts[session]
            # The last token of an answer is not computed, and here it is another one.
            before = (len(prompt) - _ANSWER if turn else known) // _BLOCK * _BLOCK
            prompt += tokens(_RESULT)
            yield list(prompt), before
            known = _SHARED
            prompt += tokens(_ANSWER)


def throughput(options: argparse.Namespace, folder: Path) -> None:
    """Prints tokens per second beside writing to disk, and without."""
    generator = random.Random(1)
    how = {"max_model_len": 512, "max_num_seqs": 16, "num_kv_blocks": 1024}
    own: Mapping[str, Mapping[str, Any]] = {
        "none": {},
        "disk": {"plugin_option": {"kv_disk": {"dir": str(folder), "disk": "4GiB"}}},
    }
    rates: dict[str, list[float]] = {name: [] for name in own}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(LLM(options.model, **how, **more))
            for name, more in own.items()
        }
        for number in range(options.rounds + 1):
            prompts = [
                {"prompt_token_ids": [generator.randrange(100, 200) for _ in range(256)]}
                for _ in range(16)
            ]
            # Each is first as often as the other.
            for name in sorted(engines, reverse=bool(number % 2)):
                rate = tokens_per_second(engines[name], prompts)
                if number:
                    rates[name].append(rate)
    medians = {name: statistics.median(found) for name, found in rates.items()}
    print(f"throughput: {medians['none']:.0f} tokens/s, with disk {medians['disk']:.0f}, ", end="")
    ratio = statistics.median(
        disk / none for disk, none in zip(rates["disk"], rates["none"], strict=True)
    )
    print(f"ratio {ratio:.3f} (goal {_THROUGHPUT})")


def tokens_per_second(llm: LLM, prompts: Sequence[Any]) -> float:
    """Tokens of prompts and answers per second."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    counts = [len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs]
    return sum(counts) / seconds


def ask(llm: LLM, prompt: list[int]) -> Any:
    """The output for a prompt."""
    params = SamplingParams(temperature=0, max_tokens=_ANSWER, ignore_eos=True)
    [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    assert output.error is None, output.error
    return output


def block_bytes(llm: LLM) -> int:
    """Bytes of a block over all layers."""
    groups = llm.engine.client.core.scheduler.blocks.config.groups
    return sum(len(group.layers) * group.spec.page_bytes for group in groups)


if __name__ == "__main__":
    main()
