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
    router = route(urls)
    commands.append(router)
    yield commands, urls, router.url()
    for command in commands:
        if command.process.returncode is None:
            command.kill()


def route(urls: Sequence[str]) -> Command:
    words = [word for url in urls for word in ("--backend", url)]
    return Command("route", *words, "--port", "0", "--health-interval", "0.3")


@pytest.mark.parametrize("count", [16, pytest.param(64, marks=pytest.mark.nightly)])
async def test_a_killed_router_breaks_streams_that_another_answers(servers, count):
    """None of its streams ends as if it were whole. Another router over the same servers gives each
    the answer of an unbroken stream, and the servers go on with nothing that nobody reads."""
    _, urls, _ = servers
    routers = [route(urls), route(urls)]
    try:
        first, second = (router.url() for router in routers)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as client:
            alone = [await ask(client, urls[0], *kind) for kind in KINDS]
            begun: set[int] = set()
            broken = []

            async def answer(number: int) -> Any:
                kind = KINDS[number % len(KINDS)]
                try:
                    return await ask(client, first, *kind, begun, number)
                except aiohttp.ClientError:
                    broken.append(number)
                    return await ask(client, second, *kind)

            asking = [asyncio.create_task(answer(number)) for number in range(count)]
            while len(begun) < count // 2 and not all(task.done() for task in asking):
                await asyncio.sleep(0.001)
            routers[0].kill()
            for number, got in enumerate(await asyncio.gather(*asking)):
                assert got == alone[number % len(KINDS)]
            assert broken
            async with asyncio.timeout(60):
                while any([await num_running(client, url) for url in urls]):
                    await asyncio.sleep(0.05)
    finally:
        for router in routers:
            if router.process.returncode is None:
                router.kill()


async def num_running(client: aiohttp.ClientSession, url: str) -> float:
    async with client.get(f"{url}/metrics") as answer:
        text = await answer.text()
    found = re.search(r"^toolkit_lm_num_sequences_running(?:{.*})? (\S+)$", text, re.M)
    assert found is not None, text
    return float(found[1])


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
