"""Costly clients, from an address of their own, and an honest one that times what it feels of them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

from http_client import exchange, fetch

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
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127"
STREAM = json.dumps({"prompt": ["a"] * 4, "n": 4, "max_tokens": 200, "ignore_eos": True, "logprobs": 5, "stream": True}).encode()
CONNECTION_KINDS = ("half-open connections", "slow readers", "aborted streams")
BROKEN_OFF = (OSError, ValueError, IndexError, asyncio.IncompleteReadError)
"""What a client meets when the server hangs up."""


class Honest(NamedTuple):
    """What an honest client met: seconds of each request, and answers that were not the expected one."""

    seconds: list[float]
    health: list[float]
    metrics: list[float]
    wrong: Counter[str]

    def percentiles(self) -> tuple[float, float]:
        """The p50 and p99 of small requests, in seconds."""
        return median(self.seconds), quantiles([*self.seconds, *self.seconds], n=100)[98]


async def ask_small(port: int, seconds: float, expected: str | None) -> Honest:
    """Asks small greedy requests, one at a time, at least three. `expected`: None takes any answer."""
    found, end = Honest([], [], [], Counter()), time.monotonic() + seconds
    while time.monotonic() < end or len(found.seconds) < 3:
        begin = time.perf_counter()
        reply = await fetch(port, "POST", COMPLETIONS, SMALL)
        found.seconds.append(time.perf_counter() - begin)
        answer = reply.json()["choices"][0]["text"] if reply.status == 200 else f"status {reply.status}"
        if expected is not None and answer != expected:
            found.wrong[answer] += 1
        for times, path in ((found.health, "/health"), (found.metrics, "/metrics")):
            begin = time.perf_counter()
            await fetch(port, "GET", path)
            times.append(time.perf_counter() - begin)
        await asyncio.sleep(0.02)
    return found


async def flood(port: int, path: str, body: bytes, statuses: Counter[int | str]) -> None:
    """Sends one request after another until it is cancelled."""
    while True:
        await send(port, path, body, statuses)
        await asyncio.sleep(0)


async def send(port: int, path: str, body: bytes, statuses: Counter[int | str]) -> None:
    try:
        statuses[(await fetch(port, "POST", path, body, source=ATTACKER)).status] += 1
    except BROKEN_OFF:
        statuses["broken off"] += 1


async def idle(port: int, count: int, stack: AsyncExitStack, sent: bytes) -> None:
    """Opens connections that say no more than `sent`, and are closed with the stack."""
    for _ in range(count):
        _, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0))
        stack.callback(writer.close)
        writer.write(sent)


async def half_open(port: int, rng: Random) -> None:
    """Holds connections with half a head for some seconds."""
    async with AsyncExitStack() as stack:
        await idle(port, 20, stack, HALF_A_HEAD)
        await asyncio.sleep(rng.uniform(0.5, 5))


async def read_slowly(port: int, rng: Random) -> None:
    """Takes a few events of a long stream, with pauses, and leaves the rest unread."""
    async with exchange(port, "POST", COMPLETIONS, STREAM, source=ATTACKER) as one:
        if await one.head() != 200:
            return
        left = rng.randint(2, 10)
        async for _ in one.events():
            await asyncio.sleep(0.5)
            left -= 1
            if left == 0:
                return


async def abort_stream(port: int, rng: Random) -> None:
    """Hangs up in a stream."""
    async with exchange(port, "POST", COMPLETIONS, STREAM, source=ATTACKER) as one:
        if await one.head() == 200:
            left = rng.randint(1, 30)
            async for _ in one.events():
                left -= 1
                if left == 0:
                    return


class Attackers:
    """Clients that send everything costly, in random order."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._seed = port, seed
        self.outcomes: dict[str, Counter[int | str]] = {name: Counter() for name in (*BODIES, *CONNECTION_KINDS)}
        """By kind."""
        self._bodies = {name: (path, json.dumps(body).encode()) for name, (path, body) in BODIES.items()}
        self._connections = dict(zip(CONNECTION_KINDS, (half_open, read_slowly, abort_stream), strict=True))

    async def warm_up(self, seconds: float) -> None:
        """Begins each kind once, all at a time, and hangs up on what takes longer."""
        tasks = [asyncio.create_task(self._attack(kind, Random(self._seed))) for kind in self.outcomes]
        await asyncio.wait(tasks, timeout=seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def attack(self, number: int) -> None:
        """One client, until it is cancelled."""
        rng = Random(f"{self._seed}-{number}")
        while True:
            await self._attack(rng.choice([*self.outcomes]), rng)
            await asyncio.sleep(0)

    async def _attack(self, kind: str, rng: Random) -> None:
        outcomes = self.outcomes[kind]
        if kind in self._bodies:
            await send(self._port, *self._bodies[kind], outcomes)
            return
        try:
            await self._connections[kind](self._port, rng)
            outcomes["done"] += 1
        except BROKEN_OFF:
            outcomes["broken off"] += 1
