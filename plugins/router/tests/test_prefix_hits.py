"""Conversations over four real servers behind the router find what a server has cached of them,
nearly as much as if there were one server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
import pytest
from continued import SERVE, Command

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
NUM_CONVERSATIONS = 24
NUM_TURNS = 5
LEAST = 0.95
"""Share of one server's hits."""


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    """Of four servers, and of their router."""
    longer = ("--hf-overrides", '{"max_position_embeddings": 4096}')
    commands = [Command(*SERVE, *longer) for _ in range(4)]
    found = [command.url() for command in commands]
    words = [word for url in found for word in ("--backend", url)]
    commands.append(Command("route", *words, "--port", "0"))
    yield [*found, commands[-1].url()]
    for command in commands:
        command.kill()


async def talk(client: aiohttp.ClientSession, url: str, system: str, number: int) -> int:
    """Prompt tokens of a conversation that were cached."""
    messages = [{"role": "system", "content": system}]
    cached = 0
    for turn in range(NUM_TURNS):
        messages.append({"role": "user", "content": f"{number} asks {turn} of cats. " * 32})
        body = {"messages": messages, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found = await answer.json()
        messages.append(found["choices"][0]["message"])
        cached += found["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


async def hits(url: str, name: str) -> int:
    """Cached tokens of all conversations, of which some are held at a time."""
    system = f"{name} tells of the sea, of ships and of a cat that sails. " * 24
    places = asyncio.Semaphore(6)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as client:

        async def of_conversation(number: int) -> int:
            async with places:
                return await talk(client, url, system, number)

        return sum(await asyncio.gather(*map(of_conversation, range(NUM_CONVERSATIONS))))


async def test_hits_are_nearly_those_of_one_server(urls):
    *servers, router = urls
    alone = await hits(servers[0], "Anna")
    routed = await hits(router, "Otto")
    assert alone > 0
    assert routed >= LEAST * alone, (routed, alone)
