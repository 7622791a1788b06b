"""What costly clients do to a small request beside them: its time, the server's memory, and what is left behind.

usage: python benchmarks/attack.py [--seconds 20] [--model tiny] [--attackers 8]

Attackers, from an address of their own, send what is as costly as the server takes, one kind after the other, as fast as they get
answers, or open connections and send nothing. An honest client sends small greedy requests, one at a time, and asks for /health. Each
kind is reported with the honest requests' p50 and p99 (and their ratios to those without attackers), the longest /health, the statuses
that attackers got, and the most memory that front and engine had beyond their first. Exit code 1 when an honest answer is not the one
that it gets alone, a memory grows by more than 1 GiB, or something is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from http_client import fetch
from server_process import ServerProcess

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ATTACKER = "127.0.0.2"
SMALL = {"prompt": "Once upon a time there was", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
LONG = "Once upon a time there was a cat. " * 12
STOPS = [f"{number:04}" * 256 for number in range(64)]
BODIES: dict[str, tuple[str, Any]] = {
    "stop texts, n, prompts": (COMPLETIONS, {"prompt": ["a"] * 16, "n": 128, "max_tokens": 1, "stop": STOPS}),
    "256 prompts, n": (COMPLETIONS, {"prompt": ["a"] * 256, "n": 128, "max_tokens": 1, "stop": STOPS}),
    "allowed tokens": (COMPLETIONS, {"prompt": ["a"] * 64, "max_tokens": 16, "allowed_token_ids": list(range(3, 300))}),
    "bad words": (COMPLETIONS, {"prompt": ["a"] * 8, "max_tokens": 16, "bad_words": [f"{i:03}" + "x" * 250 for i in range(300)]}),
    "log probabilities": (COMPLETIONS, {"prompt": [LONG] * 4, "n": 8, "max_tokens": 100, "logprobs": 5, "prompt_logprobs": 20}),
    "long answers": (COMPLETIONS, {"prompt": ["a"] * 32, "n": 4, "max_tokens": 200, "ignore_eos": True}),
    "beams": (COMPLETIONS, {"prompt": "a", "n": 64, "use_beam_search": True, "temperature": 0, "max_tokens": 100}),
    "wide JSON": (COMPLETIONS, {"prompt": [[5, 6, 7]] * 200_000}),
    "unknown fields": (COMPLETIONS, {f"field{i}": i for i in range(200_000)}),
    "a long conversation": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 50_000}),
}


class Honest(NamedTuple):
    """What an honest client met."""

    seconds: list[float]
    health: list[float]
    num_wrong: int


async def ask_small(port: int, seconds: float, expected: str | None) -> Honest:
    found = Honest([], [], 0)
    num_wrong, end = 0, time.monotonic() + seconds
    while time.monotonic() < end or len(found.seconds) < 3:
        begin = time.perf_counter()
        reply = await fetch(port, "POST", COMPLETIONS, SMALL)
        found.seconds.append(time.perf_counter() - begin)
        answer = reply.json()["choices"][0]["text"] if reply.status == 200 else f"status {reply.status}"
        num_wrong += expected is not None and answer != expected
        begin = time.perf_counter()
        await fetch(port, "GET", "/health")
        found.health.append(time.perf_counter() - begin)
        await asyncio.sleep(0.02)
    return found._replace(num_wrong=num_wrong)


async def flood(port: int, path: str, body: bytes, statuses: Counter[int | str]) -> None:
    while True:
        try:
            statuses[(await fetch(port, "POST", path, body, source=ATTACKER)).status] += 1
        except (OSError, ValueError, IndexError, asyncio.IncompleteReadError):
            statuses["broken off"] += 1
        await asyncio.sleep(0)


async def idle(port: int, count: int, stack: AsyncExitStack, sent: bytes) -> None:
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0))
        stack.callback(writer.close)
        writer.write(sent)


class Attack:
    """One server under each attack in turn."""

    def __init__(self, server: ServerProcess, num_attackers: int, seconds: float) -> None:
        self.server, self.num_attackers, self.seconds = server, num_attackers, seconds
        self.violations: list[str] = []

    async def run(self) -> None:
        port = self.server.port
        reply = await fetch(port, "POST", COMPLETIONS, SMALL)
        self.expected = reply.json()["choices"][0]["text"]
        await ask_small(port, 2, None)
        self.alone = await ask_small(port, self.seconds, self.expected)
        self.first = self._resident()
        self.show("nobody", self.alone, Counter(), [self.first])
        for name, (path, body) in BODIES.items():
            data, statuses = json.dumps(body).encode(), Counter[int | str]()
            tasks = [asyncio.create_task(flood(port, path, data, statuses)) for _ in range(self.num_attackers)]
            await self._watched(name, statuses)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(2)
        for name, sent in (("idle connections", b""), ("half a head", b"POST /v1/completions HTTP/1.1\r\nhost: 127")):
            async with AsyncExitStack() as stack:
                await idle(port, 900, stack, sent)
                await self._watched(name, Counter())
        await self._settled()

    async def _watched(self, name: str, statuses: Counter[int | str]) -> None:
        honest = asyncio.create_task(ask_small(self.server.port, self.seconds, self.expected))
        resident = []
        while not honest.done():
            resident.append(self._resident())
            await asyncio.wait([honest], timeout=0.1)
        self.show(name, honest.result(), statuses, resident)

    def show(self, name: str, honest: Honest, statuses: Counter[int | str], resident: list[list[int]]) -> None:
        p50, p99 = median(honest.seconds), quantiles([*honest.seconds, *honest.seconds], n=100)[98]
        alone50, alone99 = median(self.alone.seconds), quantiles([*self.alone.seconds, *self.alone.seconds], n=100)[98]
        growth = [max(sizes) - first for *sizes, first in zip(*resident, self.first, strict=True)]
        print(
            f"{name:<24} p50 {1000 * p50:6.0f} ms ({p50 / alone50:4.1f}x)  p99 {1000 * p99:6.0f} ms ({p99 / alone99:4.1f}x)  "
            f"/health {1000 * max(honest.health):5.0f} ms  memory {' '.join(f'{size / 2**20:+6.0f}' for size in growth)} MiB  "
            f"{len(honest.seconds)} asked  {dict(statuses)}",
            flush=True,
        )
        if honest.num_wrong:
            self.violations.append(f"{name}: {honest.num_wrong} honest answers are not what they are alone")
        if max(growth) > 2**30:
            self.violations.append(f"{name}: memory grew by {max(growth) / 2**20:.0f} MiB")

    async def _settled(self) -> None:
        await asyncio.sleep(5)
        figures = await self.server.figures()
        names = ("num_sequences_running", "num_requests_waiting", "kv_cache_usage_ratio")
        if left := {name: figures[name] for name in names if figures[name]}:
            self.violations.append(f"left at the end: {left}")
        for process in self.server.processes():
            print(f"process {process.pid}: {process.num_fds()} descriptors, {process.num_threads()} threads")

    def _resident(self) -> list[int]:
        """Bytes of front and engine."""
        return [process.memory_info().rss for process in self.server.processes()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20, help="of each attack")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--attackers", type=int, default=8)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess(Path(folder), args.model, "--dtype=float32")
        try:
            asyncio.run(server.wait_ready())
            attack = Attack(server, args.attackers, args.seconds)
            asyncio.run(attack.run())
        finally:
            code = server.stop()
        if code != 0:
            attack.violations.append(f"the server ended with exit code {code}")
        if "Traceback" in (log := server.log.read_text()):
            attack.violations.append(f"the server logged a traceback: {log[-3000:]}")
    print("\n".join(["violations:", *attack.violations]) if attack.violations else "no violations")
    return 1 if attack.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
