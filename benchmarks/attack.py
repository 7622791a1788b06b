"""Measures the harm of costly clients to a small request sent at the same time: its time, the
server's memory, and leftovers.

usage: python benchmarks/attack.py [--seconds 20] [--model tiny] [--attackers 8]
                  [--serve="--step-time-target 0.005"] [--kinds "long answers" beams]

Attackers, from an address of their own, send what is as costly as the server takes, one kind after
the other, as fast as they get answers, or open connections and send nothing. An honest client sends
small greedy requests, one at a time, and asks for /health. Each kind is reported with the honest
requests' p50 and p99 (and their ratios to those without attackers), the longest /health, the
statuses that attackers got, and the most memory that front and engine had beyond their first. Exit
code 1 when an honest answer is not the one that it gets alone, a memory grows by more than 1 GiB,
or something is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import tempfile
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

from attackers import BODIES, COMPLETIONS, HALF_A_HEAD, SMALL, Honest, ask_small, attacking, idle
from http_client import fetch
from server_process import ServerProcess


class Attack:
    """One server under each attack in turn."""

    def __init__(
        self, server: ServerProcess, num_attackers: int, seconds: float, kinds: list[str]
    ) -> None:
        self.server = server
        self.kinds = kinds
        self.num_attackers = num_attackers
        self.seconds = seconds
        self.violations: list[str] = []

    async def run(self) -> None:
        port = self.server.port
        reply = await fetch(port, "POST", COMPLETIONS, SMALL)
        self.expected = reply.json()["choices"][0]["text"]
        await ask_small(port, 2, None)
        self.alone = await ask_small(port, self.seconds, self.expected)
        self.first = self._resident()
        self.show("nobody", self.alone, [self.first])
        for name in self.kinds:
            async with attacking(port, 0, self.num_attackers, [name]) as outcomes:
                watched = await self._watched()
            self.show(name, *watched, outcomes[name])
            await asyncio.sleep(2)
        for name, sent in (("idle connections", b""), ("half a head", HALF_A_HEAD)):
            async with AsyncExitStack() as stack:
                await idle(port, 900, stack, sent)
                watched = await self._watched()
            self.show(name, *watched)
        await self._settled()

    async def _watched(self) -> tuple[Honest, list[list[int]]]:
        """Results of an honest client, and the memory in bytes of front and engine meanwhile."""
        honest = asyncio.create_task(ask_small(self.server.port, self.seconds, self.expected))
        resident = []
        while not honest.done():
            resident.append(self._resident())
            await asyncio.wait([honest], timeout=0.1)
        return honest.result(), resident

    def show(
        self,
        name: str,
        honest: Honest,
        resident: list[list[int]],
        outcomes: Counter[str] | None = None,
    ) -> None:
        p50, p99 = honest.percentiles()
        alone50, alone99 = self.alone.percentiles()
        growth = [max(sizes) - first for *sizes, first in zip(*resident, self.first, strict=True)]
        print(
            f"{name:<24} p50 {1000 * p50:6.0f} ms ({p50 / alone50:4.1f}x)  p99 {1000 * p99:6.0f} "
            f"ms ({p99 / alone99:4.1f}x)  "
            f"/health {1000 * max(honest.health):5.0f} ms  memory "
            f"{' '.join(f'{size / 2**20:+6.0f}' for size in growth)} MiB  "
            f"{len(honest.seconds)} asked  {dict(outcomes or {})}",
            flush=True,
        )
        if honest.wrong:
            self.violations.append(
                f"{name}: {honest.wrong.total()} honest answers are not what they are alone: "
                f"{dict(honest.wrong)}"
            )
        if max(growth) > 2**30:
            self.violations.append(f"{name}: memory grew by {max(growth) / 2**20:.0f} MiB")

    async def _settled(self) -> None:
        await asyncio.sleep(5)
        figures = await self.server.figures()
        names = ("num_sequences_running", "num_requests_waiting", "kv_cache_usage_ratio")
        if left := {name: figures[name] for name in names if figures[name]}:
            self.violations.append(f"left at the end: {left}")
        for process in self.server.processes():
            print(
                f"process {process.pid}: {process.num_fds()} descriptors, "
                f"{process.num_threads()} threads"
            )

    def _resident(self) -> list[int]:
        """Bytes of front and engine."""
        return [process.memory_info().rss for process in self.server.processes()]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20, help="of each attack")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--attackers", type=int, default=8)
    parser.add_argument("--serve", default="", help="options of the server")
    parser.add_argument("--kinds", nargs="+", default=[*BODIES], choices=[*BODIES])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options = shlex.split(args.serve)
        server = ServerProcess(Path(folder), args.model, "--dtype=float32", *options)
        try:
            asyncio.run(server.wait_ready())
            attack = Attack(server, args.attackers, args.seconds, args.kinds)
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
