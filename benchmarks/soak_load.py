"""Random mixed load: clients that ask, check, misbehave and leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from http_client import Exchange, exchange, fetch
from soak_jobs import LONG_AGO, MAX_MODEL_LEN, MOST_TOKENS, Job

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
BAD: list[tuple[str, str, Any, int]] = [
    ("POST", CHAT, b"{not json", 400),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
    ("POST", CHAT, [], 400),
    ("POST", CHAT, {}, 400),
    ("POST", CHAT, {"messages": []}, 400),
    ("POST", CHAT, {"messages": [{"role": "user"}], "temperature": "hot"}, 400),
    ("POST", CHAT, {"messages": HI, "no such field": 1}, 400),
    ("POST", CHAT, {"messages": HI, "tools": [{"type": "function"}]}, 400),
    ("POST", CHAT, {"messages": HI, "model": "gpt-5"}, 404),
    ("POST", CHAT, {"messages": HI, "top_logprobs": 2}, 400),
    ("POST", CHAT, {"messages": [{"role": "user", "content": LONG_AGO * 40}]}, 400),
    ("POST", COMPLETIONS, {"prompt": ""}, 400),
    ("POST", COMPLETIONS, {"prompt": []}, 400),
    ("POST", COMPLETIONS, {"prompt": [1, 999_999]}, 400),
    ("POST", COMPLETIONS, {"prompt": [1, -1]}, 400),
    ("POST", COMPLETIONS, {"prompt": [5] * MAX_MODEL_LEN}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "temperature": -1}, 400),
    ("POST", COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
    ("POST", COMPLETIONS, {"prompt": "a", "top_p": 0}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "n": 0}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "n": 10**6}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "stop": [""]}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, 400),
    ("POST", COMPLETIONS, {"prompt": "a", "xtc_threshold": -1}, 400),
    ("POST", COMPLETIONS, b'{"prompt": "' + b"a" * 2**17 + b'"}', 413),
    ("POST", "/v1/nothing", {}, 404),
    ("GET", CHAT, None, 405),
]
"""Method, path, body and the status that must come. The server takes bodies of 64 KiB at most."""

Kind = tuple[str, float, Callable[[Random], Awaitable[str]]]
"""Name, weight and work of a kind of request."""


class RefusedError(Exception):
    """A good request got another status than 200."""

    def __init__(self, status: int, reply: bytes) -> None:
        super().__init__(f"{status} {reply[:300]!r}")
        self.status = status


class Load:
    """Clients of one server. They count what they see, and note what must not be."""

    def __init__(self, port: int, jobs: list[Job], seed: int, *, priorities: bool = True) -> None:
        """`priorities`: the server takes them."""
        self._port = port
        self._jobs = jobs
        self._seed = seed
        self._priorities = priorities
        self.tally: Counter[tuple[str, str]] = Counter()
        """Counts by kind and outcome."""
        self.violations: list[str] = []
        self.num_compared = 0
        """Choices that were compared with the reference."""
        self.num_tokens = 0
        self._kinds: list[Kind] = [
            ("good", 45, self._good),
            ("sampled", 15, self._sampled),
            ("hang-up", 20, self._hang_up),
            ("bad", 12, self._bad),
            ("deadline", 8, self._deadline),
        ]

    async def run(self, num_clients: int, seconds: float) -> None:
        # Each kind at least once, and early: what they make the server import is no growth.
        for bad in BAD:
            self.tally["bad", await self._refusal(*bad)] += 1
        end = time.monotonic() + seconds
        await asyncio.gather(
            *(
                self._client(Random(f"{self._seed}-{number}"), end, self._kinds)
                for number in range(num_clients)
            )
        )

    async def run_good(self, num_clients: int, seconds: float) -> None:
        """Requests that are compared with the reference, and no others."""
        end = time.monotonic() + seconds
        good = self._kinds[:1]
        await asyncio.gather(
            *(
                self._client(Random(f"{self._seed}-{number}"), end, good)
                for number in range(num_clients)
            )
        )

    async def _client(self, rng: Random, end: float, kinds: list[Kind]) -> None:
        names, weights, _ = zip(*kinds, strict=True)
        work = {name: run for name, _, run in kinds}
        while time.monotonic() < end:
            [kind] = rng.choices(names, weights)
            try:
                outcome = await work[kind](rng)
            except (
                RefusedError,
                OSError,
                asyncio.IncompleteReadError,
                ValueError,
                KeyError,
            ) as error:
                outcome = "broken off"
                self.violations.append(f"{kind}: {type(error).__name__}: {error}")
            self.tally[kind, outcome] += 1

    async def _good(self, rng: Random) -> str:
        job = rng.choice(self._jobs)
        n = min(rng.choice([1, 1, 1, 2, 3]), MOST_TOKENS // job.size)
        priority = {"priority": rng.randint(0, 3)} if self._priorities else {}
        answers = await self._ask(rng, job.path, {**job.body, "n": n, **priority})
        complaints = [
            complaint for text, reason in answers if (complaint := job.complaint(text, reason))
        ]
        if len(answers) != n:
            complaints.append(f"{job.body} gave {len(answers)} choices, not {n}")
        self.num_compared += len(answers)
        self.num_tokens += job.num_tokens * n
        self.violations += complaints
        return "not the answer it gets alone" if complaints else "as alone"

    async def _sampled(self, rng: Random) -> str:
        num_tokens = rng.randint(1, 50)
        n = rng.choice([1, 2, 4])
        body = {
            "prompt": LONG_AGO[: rng.randint(1, 200)],
            "max_tokens": num_tokens,
            "n": n,
            "ignore_eos": True,
            "temperature": 1.5,
        }
        if rng.random() < 0.5:
            body |= {
                "seed": rng.randint(0, 9),
                "top_p": 0.9,
                "repetition_penalty": 1.2,
                "presence_penalty": 0.5,
            }
        answers = await self._ask(rng, COMPLETIONS, body)
        self.num_tokens += num_tokens * n
        if [reason for _, reason in answers] != ["length"] * n:
            self.violations.append(f"{body} ended with {answers}")
        return "complete"

    async def _deadline(self, rng: Random) -> str:
        """A request that cannot be over in time."""
        body = {
            "prompt": [5, 6, 7],
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0,
            "timeout": rng.uniform(0.001, 0.2),
        }
        try:
            [(_, reason)] = await self._ask(rng, COMPLETIONS, body)
        except RefusedError as refused:
            if refused.status != 504:
                raise
            return "over before the first token (504)"
        if reason not in ("timeout", "length"):
            self.violations.append(f"a request with a deadline ended with {reason!r}")
        return f"ended with {reason}"

    async def _bad(self, rng: Random) -> str:
        method, path, body, status = rng.choice(BAD)
        if isinstance(body, dict) and rng.random() < 0.3:
            body = {**body, "stream": True}
        return await self._refusal(method, path, body, status)

    async def _refusal(self, method: str, path: str, body: Any, status: int) -> str:
        reply = await fetch(self._port, method, path, body)
        if reply.status != status or "error" not in reply.json():
            self.violations.append(
                f"{method} {path} {str(body)[:200]} gave {reply.status} {reply.body[:200]!r}, "
                f"not {status}"
            )
        return f"refused ({reply.status})"

    async def _hang_up(self, rng: Random) -> str:
        body = {
            "prompt": LONG_AGO[: rng.randint(1, 300)],
            "max_tokens": 120,
            "ignore_eos": True,
            "n": rng.choice([1, 1, 3]),
        }
        moment = rng.choice(
            ["in the body", "at once", "after a while", "in the stream", "without a stream"]
        )
        data = json.dumps({**body, "stream": moment != "without a stream"}).encode()
        declared = len(data) + 10 if moment == "in the body" else None
        async with exchange(self._port, "POST", COMPLETIONS, data, declared=declared) as one:
            if moment in ("after a while", "without a stream"):
                await asyncio.sleep(rng.expovariate(10))
            if moment == "in the stream" and await one.head() == 200:
                left = rng.randint(1, 60)
                async for _ in one.events():
                    left -= 1
                    if left == 0:
                        break
        return moment

    async def _ask(
        self, rng: Random, path: str, body: dict[str, Any]
    ) -> list[tuple[str, str | None]]:
        """The text and the finish reason of each choice. While the server says 429, it is asked
        again when it wants to be."""
        stream = rng.random() < 0.6
        data = json.dumps({**body, "stream": stream}).encode()
        while True:
            async with exchange(self._port, "POST", path, data) as one:
                status = await one.head()
                if status == 200:
                    return await (_streamed(one) if stream else _at_once(one))
                reply = await one.body()
            if status != 429:
                raise RefusedError(status, reply)
            self.tally["any of these", "asked to come again (429)"] += 1
            await asyncio.sleep(float(one.headers["retry-after"]))


async def _at_once(one: Exchange) -> list[tuple[str, str | None]]:
    choices = json.loads(await one.body())["choices"]
    return [
        (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
        )
        for choice in choices
    ]


async def _streamed(one: Exchange) -> list[tuple[str, str | None]]:
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    done = False
    async for event in one.events():
        done = event == b"[DONE]"
        if done:
            continue
        data = json.loads(event)
        if "error" in data:
            raise ValueError(f"an error in the stream: {data}")
        for choice in data["choices"]:
            new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + new
            reasons[choice["index"]] = choice["finish_reason"] or reasons.get(choice["index"])
    if not done:
        raise ConnectionError("the stream ended without [DONE]")
    return [(texts[index], reasons[index]) for index in sorted(texts)]
