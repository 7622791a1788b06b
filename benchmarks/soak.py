"""Minutes of mixed random load against a server whose pool is far too small, and what must be left
of it at the end: nothing.

usage: python benchmarks/soak.py [--minutes 10] [--seed 0] [--clients 24] [--jobs 100] [--attackers
0]

The server runs the tiny model in float32 with 72 KV blocks of 4 tokens, 8 sequences, a budget of 64
tokens, swap memory, prefix caching and a queue of 8 requests. Clients send chats and completions,
streamed and not, with n up to 4, shared prefixes, priorities and deadlines; they hang up at any
moment, send what must be refused, and come again when they are told to (429). Every greedy answer
is compared with the one that the same request gets alone. Exit code 1 when anything is not as it
must be:
    - each request gets its answer, or the status that it deserves
    - then no sequence runs, no request waits, no block is used
    - the memory of all server processes has grown by less than 5% since a fifth of the time was
      over (in runs of 3 minutes and more: it takes a minute until caches and allocators have what
      they need)
    - SIGTERM ends the server with exit code 0; no process and no temporary file is left; no
      traceback was logged

With --attackers N the server has its default bounds, and the clients send good requests only. In
seven tenths of the time N attackers send, from an address of their own, costly requests of every
kind, half-open connections, slow readers, and streams that they abort. Then it is a violation too
when
    - the p99 of small requests is more than three times the one without attackers
    - /health or /metrics takes longer than 0.1 seconds (in runs of 3 minutes and more)
    - file descriptors, threads or memory of front or engine are not those from before, some seconds
      after the attackers have gone
Memory has until three fifths of the time to settle.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from server_process import ServerProcess
from soak_attack import SERVER as ATTACKED_SERVER, AttackedLoad
from soak_jobs import MAX_MODEL_LEN, Job, make_jobs
from soak_load import Load

SERVER = {
    "dtype": "float32",
    "max-model-len": MAX_MODEL_LEN,
    "block-size": 4,
    "num-kv-blocks": 72,
    "swap-memory": "512KiB",
    "max-num-seqs": 8,
    "max-num-batched-tokens": 64,
    "max-queued-requests": 8,
    "scheduling-policy": "priority",
    "max-body-size": "64KiB",
}
MOST_GROWTH = 0.05
GROWTH_SECONDS = 180
"""Shorter runs say nothing of growth."""
IDLE_SECONDS = 10
IDLE = ("num_sequences_running", "num_requests_waiting", "kv_cache_usage_ratio")


class Sample(NamedTuple):
    time: float
    resident: int
    figures: dict[str, float]


class Soak:
    """One run. What must not be is in `violations`."""

    def __init__(self, jobs: list[Job], seed: int, num_attackers: int = 0) -> None:
        self.jobs = jobs
        self.seed = seed
        self.num_attackers = num_attackers
        self.attacked: AttackedLoad | None = None
        self.samples: list[Sample] = []
        self.violations: list[str] = []

    async def run(self, num_clients: int, seconds: float) -> Load:
        with tempfile.TemporaryDirectory() as folder:
            options = ATTACKED_SERVER if self.num_attackers else SERVER
            server = ServerProcess(
                Path(folder), "tiny", *(f"--{name}={value}" for name, value in options.items())
            )
            try:
                await server.wait_ready()
                load = await self._load(server, num_clients, seconds)
                await self._wait_idle(server)
            finally:
                self._stop(server)
        self.violations += load.violations
        return load

    async def _load(self, server: ServerProcess, num_clients: int, seconds: float) -> Load:
        load = Load(server.port, self.jobs, self.seed, priorities=not self.num_attackers)
        watch = asyncio.create_task(self._watch(server, min(seconds / 50, 5)))
        try:
            if self.num_attackers:
                self.attacked = AttackedLoad(
                    server, load, self.num_attackers, self.seed, self._wait_idle
                )
                await self.attacked.run(num_clients, seconds)
                self.violations += self.attacked.violations
            else:
                await load.run(num_clients, seconds)
        finally:
            watch.cancel()
            await asyncio.wait([watch])
        if watch.done() and not watch.cancelled():
            watch.result()
        return load

    async def _watch(self, server: ServerProcess, interval: float) -> None:
        while True:
            self.samples.append(
                Sample(time.monotonic(), server.resident_bytes(), await server.figures())
            )
            await asyncio.sleep(interval)

    async def _wait_idle(self, server: ServerProcess) -> None:
        end = time.monotonic() + IDLE_SECONDS
        while busy := {
            name: value
            for name, value in (await server.figures()).items()
            if name.startswith(IDLE) and value
        }:
            if time.monotonic() > end:
                self.violations.append(f"{IDLE_SECONDS} s after the last request: {busy}")
                return
            await asyncio.sleep(0.1)

    def _stop(self, server: ServerProcess) -> None:
        if (code := server.stop()) != 0:
            self.violations.append(f"the server ended with exit code {code}")
        self.violations += [f"left behind: {what}" for what in server.left_behind()]
        if "Traceback" in (log := server.log.read_text()):
            self.violations.append(f"the server logged a traceback: {log[-4000:]}")

    def resident(self) -> tuple[float, float, float]:
        """Bytes at the start; after the warm-up, in the second fifth of the time, or where there
        are attackers in the fourth; in the last tenth.
        """
        start = self.samples[0].time
        end = self.samples[-1].time
        parts = [((s.time - start) / (end - start), s.resident) for s in self.samples]
        begin = 0.6 if self.num_attackers else 0.2
        warm = [r for part, r in parts if begin <= part < begin + 0.2]
        last = [r for part, r in parts if part >= 0.9]
        # A machine that is busy leaves gaps in short runs.
        return parts[0][1], median(warm or [parts[0][1]]), median(last)

    def check_growth(self) -> None:
        _, warm, last = self.resident()
        if last > warm * (1 + MOST_GROWTH):
            self.violations.append(
                f"resident memory grew by {last / warm - 1:.1%} after warm-up, from "
                f"{warm / 2**20:.0f} MiB"
            )


def report(soak: Soak, load: Load, seconds: float) -> None:
    print(f"{'request':<16}{'outcome':<40}{'number':>8}")
    for (kind, outcome), number in sorted(load.tally.items()):
        print(f"{kind:<16}{outcome:<40}{number:>8}")
    figures = soak.samples[-1].figures
    tokens = load.num_tokens
    clear = sum(job.whole for job in soak.jobs)
    start, warm, last = (size / 2**20 for size in soak.resident())
    print(
        f"compared with the reference  {load.num_compared} choices; {clear} of {len(soak.jobs)} "
        "answers are clear to their end"
    )
    print(
        f"output tokens                {tokens} in complete answers, {tokens / seconds:.0f} a "
        "second"
    )
    swapped = max(sample.figures["kv_cache_host_usage_ratio"] for sample in soak.samples)
    print(
        f"preemptions                  {figures['preemptions_total']:.0f}; up to {swapped:.0%} "
        "of the swap memory in use"
    )
    print(
        f"cached prompt tokens         {figures['prefix_cache_hits_total']:.0f} of "
        f"{figures['prompt_tokens_total']:.0f}"
    )
    print(
        f"resident memory              start {start:.0f}, warm {warm:.0f}, end {last:.0f} MiB: "
        f"{last / warm - 1:+.1%} after warm-up"
    )
    if soak.attacked is not None:
        soak.attacked.report()
    print(f"violations                   {len(soak.violations)}")
    for violation in soak.violations[:20]:
        print(f"    {violation}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--clients",
        type=int,
        help="honest clients (default 24; with attackers 2, which leave the server time)",
    )
    parser.add_argument("--attackers", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=100, help="different greedy requests")
    args = parser.parse_args()
    soak = Soak(make_jobs(args.jobs, args.seed), args.seed, args.attackers)
    load = asyncio.run(soak.run(args.clients or (2 if args.attackers else 24), args.minutes * 60))
    if args.minutes * 60 >= GROWTH_SECONDS:
        soak.check_growth()
    report(soak, load, args.minutes * 60)
    return 1 if soak.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
