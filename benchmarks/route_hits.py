"""Measures prefix hits over four real servers behind a router, with KV events and without, as
shares of one server's hits.

usage: python benchmarks/route_hits.py [--templates 16] [--uses 4] [--json]

Each workload uses templates several times, in a random order, each time with another end. `short`:
prompts of 400 bytes. `long`: of 1,500. `warmed`: long ones, each of whose templates a direct client
has sent to a random server before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import aiohttp

_PARALLEL = 6
_NUM_SERVERS = 4
_SENTENCE = "{name} tells of the sea, of ships and of a cat that sails on. "
_REPEATS = {"short": 5, "long": 24, "warmed": 24}
_ROUTERS: dict[str, tuple[str, ...]] = {"digests": (), "events": ("--kv-events",)}


def free_port() -> int:
    """A free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start(ending: ExitStack, *words: str) -> str:
    """Starts a command of `toolkit`, and returns its URL."""
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("toolkit")), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    ending.callback(process.wait)
    ending.callback(process.kill)
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r" at (http://\S+)", line):
            return found[1]
    raise RuntimeError(f"{words[0]} has ended early")


def start_server(ending: ExitStack) -> str:
    """Starts a server that publishes events."""
    options = {
        "enabled": "true",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    events = [w for n, v in options.items() for w in ("--plugin-option", f"kv_events.{n}={v}")]
    overrides = ("--hf-overrides", '{"max_position_embeddings": 4096}')
    return start(
        ending, "serve", "tiny", "--port", "0", "--no-ui", "--admin-routes", *overrides, *events
    )


async def ask(client: aiohttp.ClientSession, url: str, prompt: str) -> int:
    """Cached tokens of a prompt."""
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 2, "ignore_eos": True}
    async with client.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        usage = (await answer.json())["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


async def hits(
    url: str, servers: list[str], workload: str, run: str, templates: int, uses: int
) -> int:
    """Cached tokens of all prompts of a workload."""
    drawing = random.Random(7)  # nosec B311 # no secret
    texts = [
        _SENTENCE.format(name=f"{run} {number}") * _REPEATS[workload] for number in range(templates)
    ]
    prompts = [f"{text}Then {use} {text[:40]}" for text in texts for use in range(uses)]
    drawing.shuffle(prompts)
    places = asyncio.Semaphore(_PARALLEL)
    async with aiohttp.ClientSession() as client:
        if workload == "warmed":
            for text in texts:
                await ask(client, drawing.choice(servers), text)

        async def in_turn(prompt: str) -> int:
            async with places:
                return await ask(client, url, prompt)

        return sum(await asyncio.gather(*map(in_turn, prompts)))


async def measure(templates: int, uses: int) -> list[dict[str, object]]:
    """A row for each workload."""
    rows: list[dict[str, object]] = []
    with ExitStack() as ending:
        servers = [start_server(ending) for _ in range(_NUM_SERVERS)]
        backends = [word for url in servers for word in ("--backend", url)]
        routers = {
            name: start(ending, "route", *backends, "--port", "0", *words)
            for name, words in _ROUTERS.items()
        }
        # The router is ready with its first backend: the others follow within a check of health.
        await asyncio.sleep(5)
        for workload in _REPEATS:
            alone = await hits(servers[0], servers[:1], workload, f"{workload}0", templates, uses)
            row: dict[str, object] = {"workload": workload, "alone": alone}
            for name, url in routers.items():
                run = f"{workload}{len(row)}"
                found = await hits(url, servers, workload, run, templates, uses)
                row[name] = round(found / alone, 3)
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--templates", type=int, default=16)
    parser.add_argument("--uses", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = asyncio.run(measure(arguments.templates, arguments.uses))
    if arguments.json:
        print(json.dumps(rows, indent=1))
        return
    print("| workload | one server, cached tokens | digests | events |")
    print("| --- | --- | --- | --- |")
    for row in rows:
        print(f"| {row['workload']} | {row['alone']:,} | {row['digests']} | {row['events']} |")


if __name__ == "__main__":
    main()
