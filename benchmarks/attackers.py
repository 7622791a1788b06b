"""Costly clients, from an address of their own, and an honest one that times what it feels of them.

usage: python benchmarks/attackers.py PORT [--seed 0] [--attackers 8] [--kinds KIND ...]

Attacks a server until standard input ends. Then writes what the attackers got, as JSON: by kind,
how often which outcome.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple

from http_client import exchange, fetch

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ATTACKER = "127.0.0.2"
SMALL = {
    "prompt": "Once upon a time there was",
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
}
LONG = "Once upon a time there was a cat. " * 12
STOPS = [f"{number:04}" * 256 for number in range(64)]
BODIES: dict[str, tuple[str, Any]] = {
    "stop texts, n, prompts": (
        COMPLETIONS,
        {"prompt": ["a"] * 16, "n": 128, "max_tokens": 1, "stop": STOPS},
    ),
    "256 prompts, n": (
        COMPLETIONS,
        {"prompt": ["a"] * 256, "n": 128, "max_tokens": 1, "stop": STOPS},
    ),
    "allowed tokens": (
        COMPLETIONS,
        {"prompt": ["a"] * 64, "max_tokens": 16, "allowed_token_ids": list(range(3, 300))},
    ),
    "bad words": (
        COMPLETIONS,
        {
            "prompt": ["a"] * 8,
            "max_tokens": 16,
            "bad_words": [f"{i:03}" + "x" * 250 for i in range(300)],
        },
    ),
    "log probabilities": (
        COMPLETIONS,
        {"prompt": [LONG] * 4, "n": 8, "max_tokens": 100, "logprobs": 5, "prompt_logprobs": 20},
    ),
    "long answers": (
        COMPLETIONS,
        {"prompt": ["a"] * 32, "n": 4, "max_tokens": 200, "ignore_eos": True},
    ),
    "beams": (
        COMPLETIONS,
        {"prompt": "a", "n": 64, "use_beam_search": True, "temperature": 0, "max_tokens": 100},
    ),
    "wide JSON": (COMPLETIONS, {"prompt": [[5, 6, 7]] * 200_000}),
    "unknown fields": (COMPLETIONS, {f"field{i}": i for i in range(200_000)}),
    "a long conversation": (CHAT, {"messages": [{"role": "user", "content": "a"}] * 50_000}),
}
HALF_A_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: 127"
STREAM = json.dumps(
    {
        "prompt": ["a"] * 4,
        "n": 4,
        "max_tokens": 200,
        "ignore_eos": True,
        "logprobs": 5,
        "stream": True,
    }
).encode()
CONNECTION_KINDS = ("half-open connections", "slow readers", "aborted streams")
KINDS = (*BODIES, *CONNECTION_KINDS)
BROKEN_OFF = (OSError, ValueError, IndexError, asyncio.IncompleteReadError)
"""Errors of a client when the server hangs up."""
Outcomes = dict[str, Counter[str]]
"""Counts of statuses and other outcomes, by kind of attack."""


class Honest(NamedTuple):
    """Results of an honest client: seconds of each request, and unexpected answers."""

    seconds: list[float]
    health: list[float]
    metrics: list[float]
    wrong: Counter[str]

    def percentiles(self) -> tuple[float, float]:
        """The p50 and p99 of small requests, in seconds."""
        return median(self.seconds), quantiles([*self.seconds, *self.seconds], n=100)[98]


async def ask_small(port: int, seconds: float, expected: str | None) -> Honest:
    """Asks small greedy requests, one at a time, at least three. `expected`: None takes any
    answer."""
    found = Honest([], [], [], Counter())
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(found.seconds) < 3:
        begin = time.perf_counter()
        reply = await fetch(port, "POST", COMPLETIONS, SMALL)
        found.seconds.append(time.perf_counter() - begin)
        answer = (
            reply.json()["choices"][0]["text"] if reply.status == 200 else f"status {reply.status}"
        )
        if expected is not None and answer != expected:
            found.wrong[answer] += 1
        for times, path in ((found.health, "/health"), (found.metrics, "/metrics")):
            begin = time.perf_counter()
            await fetch(port, "GET", path)
            times.append(time.perf_counter() - begin)
        await asyncio.sleep(0.02)
    return found


async def send(port: int, path: str, body: bytes, outcomes: Counter[str]) -> None:
    try:
        outcomes[str((await fetch(port, "POST", path, body, source=ATTACKER)).status)] += 1
    except BROKEN_OFF:
        outcomes["broken off"] += 1


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

    def __init__(self, port: int, seed: int, kinds: Sequence[str] = KINDS) -> None:
        self._port = port
        self._seed = seed
        self.outcomes: Outcomes = {kind: Counter() for kind in kinds}
        self._bodies = {
            name: (path, json.dumps(body).encode()) for name, (path, body) in BODIES.items()
        }
        self._connections = dict(
            zip(CONNECTION_KINDS, (half_open, read_slowly, abort_stream), strict=True)
        )

    async def warm_up(self, seconds: float) -> None:
        """Begins each kind once, all at a time, and hangs up on what takes longer."""
        tasks = [
            asyncio.create_task(self._attack(kind, Random(self._seed))) for kind in self.outcomes
        ]
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


@asynccontextmanager
async def attacking(
    port: int, seed: int, number: int, kinds: Sequence[str] = KINDS
) -> AsyncIterator[Outcomes]:
    """Attackers for the time of the context, in a process of their own: reading what they get must
    not stop an honest client's clock.

    Yields what is empty until they have ended. Raises RuntimeError when they failed.
    """
    command = [
        sys.executable,
        __file__,
        str(port),
        f"--seed={seed}",
        f"--attackers={number}",
        "--kinds",
        *kinds,
    ]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    outcomes: Outcomes = {}
    try:
        yield outcomes
    finally:
        out, _ = await process.communicate(b"")
        if process.returncode:
            raise RuntimeError("the attackers failed; what they wrote is above")
        outcomes.update({kind: Counter(counts) for kind, counts in json.loads(out).items()})


async def _attack_until_closed(port: int, seed: int, number: int, kinds: Sequence[str]) -> Outcomes:
    attackers = Attackers(port, seed, kinds)
    closed = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    tasks = [asyncio.create_task(attackers.attack(one)) for one in range(number)]
    await asyncio.wait([closed, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for ended in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(ended, asyncio.CancelledError):
            raise ended
    return attackers.outcomes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attackers", type=int, default=8)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=KINDS,
        metavar="KIND",
        help=f"of {', '.join(KINDS)}",
    )
    args = parser.parse_args()
    print(
        json.dumps(
            asyncio.run(_attack_until_closed(args.port, args.seed, args.attackers, args.kinds))
        )
    )


if __name__ == "__main__":
    main()
