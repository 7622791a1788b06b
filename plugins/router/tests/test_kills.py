"""Real servers behind the router, one of which is killed under load: no answer is lost or wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
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
    async with aiohttp.ClientSession(timeout=timeout) as client:
        alone = [await ask(client, urls[2], *kind, asyncio.Semaphore()) for kind in KINDS]
        kinds = [number % len(KINDS) for number in range(32)]
        begun = asyncio.Semaphore(0)
        asking = [
            asyncio.create_task(ask(client, router, *KINDS[number], begun)) for number in kinds
        ]
        # Requests without a stream are asked again elsewhere.
        whole = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 300}
        whole |= {"ignore_eos": True}
        plain = [
            asyncio.create_task(post(client, f"{router}/v1/completions", whole)) for _ in range(4)
        ]
        # Others would be asked again, and not go on.
        for _ in kinds:
            await begun.acquire()
        commands[0].kill()
        found = await asyncio.gather(*asking)
        for number, got in zip(kinds, found, strict=True):
            assert got == alone[number]
        for answer in await asyncio.gather(*plain):
            assert answer["choices"][0]["text"] == alone[0][0, "text"]
        async with client.get(f"{router}/metrics") as answer:
            figures = await answer.text()
    moved = re.search(rf'migrations_total{{backend="{re.escape(urls[0])}"}} (\S+)', figures)
    assert moved is not None
    assert float(moved[1]) > 0


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with client.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()
