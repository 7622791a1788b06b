"""Streams that begin at once, in a process of their own: what comes, and when.

usage: python serving_client.py PORT, with {"prompts": [[token ids]], "max_tokens": N} on stdin.
Prints, per stream, its events as [time.monotonic(), data] pairs.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

from http_client import exchange


async def stream(port: int, prompt: list[int], max_tokens: int) -> list[tuple[float, str]]:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with exchange(port, "POST", "/v1/completions", json.dumps(body).encode()) as one:
        if await one.head() != 200:
            raise RuntimeError(f"the server answered with {one.status}: {await one.body()!r}")
        # Parsed later: the clock must not wait for it.
        return [(time.monotonic(), event.decode()) async for event in one.events()]


async def main() -> None:
    work = json.load(sys.stdin)
    start = time.monotonic()
    streams = await asyncio.gather(
        *(stream(int(sys.argv[1]), prompt, work["max_tokens"]) for prompt in work["prompts"])
    )
    json.dump({"start": start, "streams": streams}, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main())
