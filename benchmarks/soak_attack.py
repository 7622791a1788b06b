"""Honest load with and without attackers: how much slower it gets, and what the server still holds
when they are gone."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from attackers import COMPLETIONS, SMALL, Attackers, Honest, Outcomes, ask_small, attacking
from http_client import fetch
from server_process import ServerProcess
from soak_jobs import MAX_MODEL_LEN
from soak_load import Load

SERVER = {"dtype": "float32", "max-model-len": MAX_MODEL_LEN}
"""All bounds are the defaults: they are what is attacked."""
MOST_SLOWDOWN = 3
"""Highest ratio of slowdown of small requests' p99."""
MOST_PROBE_SECONDS = 0.1
PROBED_SECONDS = 180
"""That /health and /metrics may take, and the shortest run that says so: on a busy machine one of a
few answers may be late."""
WARM_UP = 0.1
ALONE = 0.2
"""The parts of the time before the baseline, and in which nobody attacks."""
MOST_GROWTH = 2**28
"""Bytes that a process may keep beside its baseline. The allocator keeps pages in which anything is
left, of what attackers may fill at a time: bodies of 16 x max_body_size are 256 MiB. What leaks has
no such bound: it grows with the minutes.
"""
MOST_THREADS = min(32, (os.cpu_count() or 1) + 4)
"""Threads beside the baseline's: asyncio.to_thread starts so many when they are first needed, and
keeps them."""
SETTLED_SECONDS = 30


class Held(NamedTuple):
    """Resources of a process."""

    files: int
    threads: int
    resident: int


class AttackedLoad:
    """An honest client of small requests, others with jobs, and attackers. What must not be is in
    `violations`."""

    def __init__(
        self,
        server: ServerProcess,
        load: Load,
        num_attackers: int,
        seed: int,
        wait_idle: Callable[[ServerProcess], Awaitable[None]],
    ) -> None:
        self._server = server
        self._load = load
        self._num_attackers = num_attackers
        self._seed = seed
        self._wait_idle = wait_idle
        self.outcomes: Outcomes = {}
        self.violations: list[str] = []
        self.baseline: list[Held] = []
        self.left: list[Held] = []

    async def run(self, num_clients: int, seconds: float) -> None:
        # Everything once: what it makes the server import, and the threads that it starts, are no
        # leak.
        await Attackers(self._server.port, self._seed).warm_up(seconds * WARM_UP)
        await self._wait_idle(self._server)
        reply = await fetch(self._server.port, "POST", COMPLETIONS, SMALL)
        expected = reply.json()["choices"][0]["text"]
        await self._honest(num_clients, 2, expected)
        self.baseline = await self._settled(None)
        self.alone = await self._honest(num_clients, seconds * ALONE, expected)
        async with attacking(self._server.port, self._seed, self._num_attackers) as self.outcomes:
            self.attacked = await self._honest(
                num_clients, seconds * (1 - WARM_UP - ALONE), expected
            )
        self.left = await self._settled(self.baseline)
        self._check(seconds)

    async def _honest(self, num_clients: int, seconds: float, expected: str) -> Honest:
        found, _ = await asyncio.gather(
            ask_small(self._server.port, seconds, expected),
            self._load.run_good(num_clients, seconds),
        )
        return found

    async def _settled(self, baseline: list[Held] | None) -> list[Held]:
        """Resources of each process some seconds later; with a baseline, as soon as they are down
        to it."""
        end = time.monotonic() + (5 if baseline is None else SETTLED_SECONDS)
        while True:
            await asyncio.sleep(1)
            held = [
                Held(one.num_fds(), one.num_threads(), one.memory_info().rss)
                for one in self._server.processes()
            ]
            if time.monotonic() > end or (
                baseline is not None and not self._excess(baseline, held)
            ):
                return held

    def _excess(self, baseline: list[Held], held: list[Held]) -> list[str]:
        found = []
        for name, before, after in zip(("front", "engine"), baseline, held, strict=True):
            found += [f"{name}: {after.files} file descriptors, {before.files} before"] * (
                after.files > before.files
            )
            found += [f"{name}: {after.threads} threads, {before.threads} before"] * (
                after.threads > before.threads + MOST_THREADS
            )
            growth = after.resident - before.resident
            found += [f"{name}: {growth / 2**20:+.0f} MiB, most {MOST_GROWTH / 2**20:.0f}"] * (
                growth > MOST_GROWTH
            )
        return found

    def _check(self, seconds: float) -> None:
        for when, honest in (("alone", self.alone), ("attacked", self.attacked)):
            for path, longest in (
                ("/health", max(honest.health)),
                ("/metrics", max(honest.metrics)),
            ):
                if longest > MOST_PROBE_SECONDS and seconds >= PROBED_SECONDS:
                    self.violations.append(
                        f"{when}: {path} took {longest:.3f} s, more than {MOST_PROBE_SECONDS} s"
                    )
            self.violations += [
                f"{when}: {number} x the small request gave {answer!r}"
                for answer, number in honest.wrong.items()
            ]
        _, alone = self.alone.percentiles()
        _, attacked = self.attacked.percentiles()
        if attacked > MOST_SLOWDOWN * alone:
            self.violations.append(
                f"p99 of small requests is {attacked / alone:.1f}x the one alone, more than "
                f"{MOST_SLOWDOWN}x"
            )
        self.violations += [
            f"left at the end: {what}" for what in self._excess(self.baseline, self.left)
        ]

    def report(self) -> None:
        for kind, outcomes in self.outcomes.items():
            told = [f"{outcome}: {number}" for outcome, number in sorted(outcomes.items())]
            print(f"{kind:<28} {', '.join(told)}")
        for when, honest in (("alone", self.alone), ("attacked", self.attacked)):
            p50, p99 = honest.percentiles()
            longest = {"/health": max(honest.health), "/metrics": max(honest.metrics)}
            shown = ", ".join(
                f"longest {path} {1000 * seconds:.0f} ms" for path, seconds in longest.items()
            )
            print(
                f"small requests, {when:<12} {len(honest.seconds)}: p50 {1000 * p50:.0f} ms, p99 "
                f"{1000 * p99:.0f} ms; {shown}"
            )
        ratios = [
            attacked / alone
            for attacked, alone in zip(
                self.attacked.percentiles(), self.alone.percentiles(), strict=True
            )
        ]
        print("attacked / alone             p50 {:.1f}x, p99 {:.1f}x".format(*ratios))
        for name, before, after in zip(("front", "engine"), self.baseline, self.left, strict=True):
            shown = [
                (
                    f"{before.files} -> {after.files} file descriptors, {before.threads} -> "
                    f"{after.threads} threads"
                )
            ]
            shown.append(f"{before.resident / 2**20:.0f} -> {after.resident / 2**20:.0f} MiB")
            print(f"{name:<28} {', '.join(shown)}")
