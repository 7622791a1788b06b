"""Real servers that publish KV events: the router knows what they hold, whoever has sent it."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from continued import SERVE, Command
from ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

_PATIENCE = 60.0


def published(**more: object) -> list[str]:
    """Words of a server that publishes events."""
    options = {
        "enabled": "true",
        "endpoint": f"tcp://127.0.0.1:{free_port()}",
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
        **more,
    }
    words = [
        word
        for name, value in options.items()
        if value is not None
        for word in ("--plugin-option", f"kv_events.{name}={value}")
    ]
    overrides = '{"max_position_embeddings": 2048}'
    return [*words, "--admin-routes", "--hf-overrides", overrides, "--block-size", "16"]


class Servers:
    """Two servers, and a router in front of them."""

    def __init__(self, client: aiohttp.ClientSession) -> None:
        self.client = client
        self.commands: list[Command] = []
        self.urls: list[str] = []
        self.router = ""

    def serve(self, *words: str) -> str:
        self.commands.append(Command(*SERVE, *words))
        self.urls.append(self.commands[-1].url())
        return self.urls[-1]

    async def route(self, *words: str) -> None:
        backends = [word for url in self.urls for word in ("--backend", url)]
        router = Command("route", *backends, "--port", "0", "--health-interval", "0.1", *words)
        self.commands.append(router)
        self.router = router.url()
        for url in self.urls:
            await self.until(lambda url=url: self.figure("ready", url))

    async def until(self, told: Callable[[], Awaitable[Any]]) -> None:
        """Returns once something is told."""
        async with asyncio.timeout(_PATIENCE):
            while not await told():
                await asyncio.sleep(0.02)

    async def figure(self, name: str, url: str = "") -> float:
        async with self.client.get(f"{self.router}/metrics") as answer:
            text = await answer.text()
        label = f'{{backend="{re.escape(url)}"}}' if url else ""
        found = re.search(rf"^toolkit_lm_router_{name}{label} (\S+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    async def ask(self, url: str, prompt: str) -> int:
        """Cached tokens of the prompt."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 2, "ignore_eos": True}
        async with self.client.post(f"{url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            found = json.loads(await answer.read())
        return found["usage"]["prompt_tokens_details"]["cached_tokens"]

    async def grows(self, done: Callable[[], Awaitable[Any]]) -> None:
        """Does something by which the router learns of chunks."""
        before = await self.figure("index_chunks")
        await done()

        async def has_grown() -> bool:
            return await self.figure("index_chunks") > before

        await self.until(has_grown)

    async def followed(self, url: str) -> None:
        """Returns once the router learns of what a backend computes."""
        before = await self.figure("index_chunks")
        names = iter(range(1000))

        async def is_followed() -> bool:
            # Events before the router has subscribed are not seen.
            await self.ask(url, text(f"{next(names)} others"))
            return await self.figure("index_chunks") > before

        await self.until(is_followed)


@asynccontextmanager
async def started() -> AsyncIterator[Servers]:
    timeout = aiohttp.ClientTimeout(total=_PATIENCE)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        servers = Servers(client)
        try:
            yield servers
        finally:
            for command in servers.commands:
                if command.process.returncode is None:
                    command.kill()


def text(name: str) -> str:
    """A prompt of about 700 bytes."""
    return f"{name} tells of the sea, of ships and of a cat that sails. " * 12


async def test_a_prefix_that_others_have_sent_is_found():
    async with started() as servers:
        servers.serve(*published())
        direct = servers.serve(*published())
        await servers.route("--kv-events")
        await servers.followed(direct)
        # Each goes to the less loaded of two random backends, if the router does not know better.
        for name in ("Anna", "Otto", "Ida", "Karl", "Mia", "Paul"):
            await servers.grows(lambda name=name: servers.ask(direct, text(name)))
            assert await servers.ask(servers.router, text(name) + "And then?") > 0
        assert await servers.figure("requests_total", direct) == 6


async def test_a_router_that_starts_later_asks_for_what_was_published():
    async with started() as servers:
        servers.serve(*published())
        direct = servers.serve(*published())
        names = ("Anna", "Otto", "Ida", "Karl", "Mia")
        for name in names:
            await servers.ask(direct, text(name))
        await servers.route("--kv-events")

        async def knows() -> bool:
            return await servers.figure("index_chunks") >= 4 * len(names)

        await servers.until(knows)
        for name in names:
            assert await servers.ask(servers.router, text(name) + "And then?") > 0
        assert await servers.figure("requests_total", direct) == len(names)


async def test_what_a_backend_has_evicted_is_forgotten():
    async with started() as servers:
        url = servers.serve(*published(), "--max-model-len", "1024", "--num-kv-blocks", "68")
        await servers.route("--kv-events")

        async def hits() -> float:
            before = await servers.figure("prefix_hits_total", url)
            await servers.ask(servers.router, text("Anna"))
            return await servers.figure("prefix_hits_total", url) - before

        assert await hits() == 0
        assert await hits() == 4
        names = iter(range(1000))

        async def is_forgotten() -> bool:
            # Others take its place.
            for _ in range(30):
                await servers.ask(url, text(f"{next(names)} others"))
            return await hits() == 0

        await servers.until(is_forgotten)
        # The cache has 1,088 tokens, and so the router knows of few.
        assert await servers.figure("index_chunks") < 60


async def test_a_backend_without_events_is_known_by_what_it_was_sent():
    async with started() as servers:
        url = servers.serve()
        await servers.route("--kv-events")
        await servers.ask(servers.router, text("Anna"))
        await servers.ask(servers.router, text("Anna"))
        assert await servers.figure("prefix_hits_total", url) > 0


async def test_a_backend_that_starts_anew_is_followed_again():
    async with started() as servers:
        servers.serve(*published())
        port = free_port()
        words = ["--port", str(port), *published(replay_endpoint=None)]
        direct = servers.serve(*words)
        await servers.route("--kv-events")
        await servers.followed(direct)
        servers.commands[1].send(signal.SIGKILL)

        async def is_down() -> bool:
            return not await servers.figure("ready", direct)

        await servers.until(is_down)
        assert await servers.figure("index_chunks") == 0
        servers.commands[1].kill()
        again = Command(*SERVE, *words)
        servers.commands.append(again)
        assert again.url() == direct
        await servers.until(lambda: servers.figure("ready", direct))
        assert await servers.figure("index_chunks") == 0
        # It has no replays: what was published before the router listened is not known.
        await servers.followed(direct)
