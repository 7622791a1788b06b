"""Real servers behind the router, one of which is killed under load: no answer is lost or wrong."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import aiohttp
import pytest
from continued import KINDS, SERVE, Command, ask

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[list[Command], list[str], str]]:
    """Three servers and their router."""
    commands = [Command(*SERVE) for _ in range(3)]
    urls = [command.url() for command in commands]
    words = [word for url in urls for word in ("--backend", url)]
    router = Command("route", *words, "--port", "0", "--health-interval", "0.3")
    commands.append(router)
    yield commands, urls, router.url()
    for command in commands:
        if command.process.returncode is None:
            command.kill()


async def test_a_kill_under_32_streams_loses_nothing(servers):
    commands, urls, router = servers
    timeout = aiohttp.ClientTimeout(total=240)
    # Requests without a stream are asked again elsewhere.
    whole = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    async with aiohttp.ClientSession(timeout=timeout) as client:
        alone = [await ask(client, urls[2], *kind) for kind in KINDS]
        for _ in range(20):
            begun: set[int] = set()
            asking = [
                asyncio.create_task(ask(client, router, *KINDS[number % len(KINDS)], begun, number))
                for number in range(32)
            ]
            plain = [
                asyncio.create_task(post(client, f"{router}/v1/completions", whole))
                for _ in range(4)
            ]
            while len(begun) < 24 and not all(task.done() for task in asking):
                await asyncio.sleep(0.001)
            commands[0].send(signal.SIGSTOP)
            while await figure(client, router, "inflight", urls[1:]):
                await asyncio.sleep(0.01)
            # Only the stopped server has requests. Another round where none of them has begun.
            if begun:
                break
            commands[0].send(signal.SIGCONT)
            await asyncio.gather(*asking, *plain)
        num_begun = len(begun)
        assert num_begun > 0
        commands[0].kill()
        for number, got in enumerate(await asyncio.gather(*asking)):
            assert got == alone[number % len(KINDS)]
        for answer in await asyncio.gather(*plain):
            assert answer["choices"][0]["text"] == alone[0][0, "text"]
        assert await figure(client, router, "migrations_total", urls[:1]) == num_begun


async def figure(
    client: aiohttp.ClientSession, router: str, name: str, backends: Sequence[str]
) -> float:
    """What the router's metrics tell, of these backends together."""
    async with client.get(f"{router}/metrics") as answer:
        text = await answer.text()
    found = [re.search(rf'_{name}{{backend="{re.escape(url)}"}} (\S+)', text) for url in backends]
    assert all(found), text
    return sum(float(each[1]) for each in found if each)


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with client.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()
