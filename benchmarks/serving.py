"""Measures the cost of the HTTP server: 64 concurrent streams against `LLM.generate` on the same
prompts, runs interleaved (A B A B), medians.

usage: python benchmarks/serving.py [--runs 3] [--streams 64] [--output 128] [--model FOLDER]

The model is of the 160M shape, in bf16. Prompts are random tokens, 96 and more of them, no two of
the same length; greedy, ignoring end-of-sequence tokens; new prompts per run. Two results:
    rate      output tokens per second, from the first request to the last token: server / offline
    delay     from a token's emission by the engine to its arrival at the client: p50, p99

Emission times are those of the engine's steps, which a plugin in the server writes down: once a
request has its first token, each step gives it one. Arrival times are those of the client, a
process of its own. Both are time.monotonic(), which processes share. Streams are recognised by the
lengths of their prompts, tokens by their texts. Streams with a token of another text are left out
of the delays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import emission_log
from checkpoints import VOCAB_SIZE, make_llama_160m
from server_process import ServerProcess

SHORTEST_PROMPT = 96
CLIENT = Path(__file__).with_name("serving_client.py")
Prompts = list[list[int]]


class Served(NamedTuple):
    """One run against the server."""

    seconds: float
    delays: list[float]
    """Seconds, per token."""
    num_left_out: int
    """Streams without delays."""
    num_events: int


def make_prompts(count: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [
        [rng.randrange(260, VOCAB_SIZE) for _ in range(SHORTEST_PROMPT + i)]
        for i in rng.sample(range(count), count)
    ]


class Offline:
    """LLM.generate in this process."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        from toolkit_lm import LLM

        self.llm = LLM(str(model), **options)

    def run(self, prompts: Prompts, max_tokens: int) -> float:
        """Seconds."""
        from toolkit_lm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        start = time.perf_counter()
        self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        return time.perf_counter() - start


class Server:
    """`toolkit serve`, with a plugin that writes down emission times."""

    def __init__(self, folder: Path, model: Path, options: dict[str, Any]) -> None:
        emission_log.install(folder / "plugins")
        self.log = folder / "emissions.jsonl"
        path = os.pathsep.join(
            filter(None, [str(folder / "plugins"), os.environ.get("PYTHONPATH")])
        )
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self.process = ServerProcess(
            folder,
            str(model),
            *flags,
            environ={"PYTHONPATH": path, emission_log.VARIABLE: str(self.log)},
        )
        asyncio.run(self.process.wait_ready())

    def run(self, prompts: Prompts, max_tokens: int) -> Served:
        begin = self.log.stat().st_size
        work = json.dumps({"prompts": prompts, "max_tokens": max_tokens})
        command = [sys.executable, str(CLIENT), str(self.process.port)]
        done = json.loads(
            subprocess.run(command, input=work, capture_output=True, text=True, check=True).stdout
        )
        time.sleep(0.2)
        with self.log.open("rb") as file:
            file.seek(begin)
            emissions = Emissions([json.loads(line) for line in file])
        delays: list[float] = []
        num_left_out = 0
        for prompt, events in zip(prompts, done["streams"], strict=True):
            arrivals = arrival_times(events)
            if len(arrivals) == max_tokens:
                delays += [
                    there - here
                    for here, there in zip(emissions.of(len(prompt)), arrivals, strict=True)
                ]
            else:
                num_left_out += 1
        last = max(events[-1][0] for events in done["streams"])
        return Served(last - done["start"], delays, num_left_out, sum(map(len, done["streams"])))


class Emissions:
    """Log of the plugin for one run."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._steps = sorted(row["time"] for row in rows if row["kind"] == "step")
        self._firsts = {row["prompt"]: row["time"] for row in rows if row["kind"] == "first_token"}
        self._lasts = {row["prompt"]: row for row in rows if row["kind"] == "finished"}
        assert not any(row["kind"] == "preempted" for row in rows), (
            "a preempted request does not get a token in each step"
        )

    def of(self, prompt_length: int) -> list[float]:
        """The emission time of each token of the request with a prompt of this length."""
        first = bisect_left(self._steps, self._firsts[prompt_length])
        last = bisect_left(self._steps, self._lasts[prompt_length]["time"])
        assert last - first + 1 == self._lasts[prompt_length]["output"], (
            "each step from the first token on gives one"
        )
        return self._steps[first : last + 1]


def arrival_times(events: list[tuple[float, str]]) -> list[float]:
    """The arrival time of each token whose text tells its id."""
    found: list[float] = []
    for arrived, event in events:
        if event != "[DONE]":
            found += [arrived] * sum(
                len(re.findall(r" w\d+", choice["text"])) for choice in json.loads(event)["choices"]
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--output", type=int, default=128, help="tokens per stream")
    parser.add_argument(
        "--model",
        type=Path,
        help="a checkpoint that benchmarks/checkpoints.py has made; default: made now",
    )
    args = parser.parse_args()
    options = {"max_model_len": 1024, "max_num_seqs": args.streams, "kv_cache_memory": "1GiB"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_llama_160m(args.model or folder / "model")
        offline = Offline(model, options)
        server = Server(folder, model, options)
        try:
            offline.run(make_prompts(args.streams, 0), 8)
            server.run(make_prompts(args.streams, 0), 8)
            rates: dict[str, list[float]] = {"offline": [], "server": []}
            runs = []
            for run in range(1, args.runs + 1):
                prompts = make_prompts(args.streams, run)
                tokens = args.streams * args.output
                rates["offline"].append(tokens / offline.run(prompts, args.output))
                runs.append(server.run(prompts, args.output))
                rates["server"].append(tokens / runs[-1].seconds)
                print(
                    f"run {run}: "
                    + ", ".join(
                        f"{key} {values[-1]:.0f} tokens/s" for key, values in rates.items()
                    ),
                    flush=True,
                )
        finally:
            server.process.stop()
        report(rates, runs)


def report(rates: dict[str, list[float]], runs: list[Served]) -> None:
    offline, server = (median(rates[key]) for key in ("offline", "server"))
    print(
        f"output tokens/s: offline {offline:.0f}, server {server:.0f}; ratio {server / offline:.2f}"
    )
    delays = [1000 * delay for run in runs for delay in run.delays]
    parts = quantiles(delays, n=100)
    print(
        f"emission to arrival: p50 {parts[49]:.1f} ms, p99 {parts[98]:.1f} ms, most "
        f"{max(delays):.1f} ms, of {len(delays)} tokens",
        end="; ",
    )
    print(
        f"{sum(run.num_left_out for run in runs)} streams left out; "
        f"{sum(run.num_events for run in runs)} events"
    )


if __name__ == "__main__":
    main()
