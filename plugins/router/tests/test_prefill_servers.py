"""Real servers behind the router, one of which computes the prompts: answers are those of a lone
server, also when a server is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from continued import KINDS, SERVE, Command, ask
from ports import free_port

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

_NUM_TOKENS = 40
_NUM_KILLED = 6
"""Requests that are under way when a server dies, of each half."""
_OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


class Servers:
    """A server for prompts, some for answers, and the router."""

    def __init__(self, commands: list[Command], client: aiohttp.ClientSession) -> None:
        self.commands = commands
        self.client = client
        self.urls = [command.url() for command in commands]

    def route(self) -> None:
        """Starts the router."""
        prefill, *decodes = self.urls
        words = [word for url in decodes for word in ("--backend", url)]
        router = Command(
            "route",
            *("--prefill-backend", prefill, *words),
            *("--prefill-min-bytes", "200", "--port", "0", "--health-interval", "0.3"),
        )
        self.commands.append(router)
        self.urls.append(router.url())

    async def ready(self) -> None:
        """Returns once the router and the decode servers know all others."""
        prefill, *decodes = self.urls[:-1]
        for url in (prefill, *decodes):
            await self.until(lambda url=url: self.figure("ready", url))
        for url in decodes:
            await self.until(lambda url=url: self.metric(url, "kv_transfer_reachable_peers"))

    async def until(self, told: Callable[[], Awaitable[float]]) -> None:
        """Returns once a figure is not 0; fails after a minute."""
        end = time.monotonic() + 60
        while not await told():
            assert time.monotonic() < end, "it never comes"
            await asyncio.sleep(0.01)

    async def text(self, url: str) -> str:
        async with self.client.get(f"{url}/metrics") as answer:
            return await answer.text()

    async def metric(self, url: str, name: str) -> float:
        """The sum of a metric over its labels."""
        found = re.findall(rf"^\w*{name}(?:\{{.*?\}})? (\S+)$", await self.text(url), re.MULTILINE)
        assert found, name
        return sum(map(float, found))

    async def figure(self, name: str, backend: str) -> float:
        """A figure of a backend, as the router tells it."""
        text = await self.text(self.urls[-1])
        found = re.search(rf'_{name}{{backend="{re.escape(backend)}"}} (\S+)', text)
        assert found, text
        return float(found[1])

    async def loads(self) -> dict[str, float]:
        """Ends of the loads of the decode servers."""
        total: dict[str, float] = {}
        for url in self.urls[1:-1]:
            for outcome, number in re.findall(
                r'kv_transfer_loads_total\{.*?outcome="(\w+)".*?\} (\S+)', await self.text(url)
            ):
                total[outcome] = total.get(outcome, 0) + float(number)
        return total

    async def post(self, url: str, path: str, fields: dict[str, Any]) -> Any:
        body = {**fields, "max_tokens": fields.get("max_tokens", _NUM_TOKENS)}
        async with self.client.post(f"{url}/v1/{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def stream(self, url: str, number: int) -> Any:
        return await ask(self.client, url, *kind(number), max_tokens=_NUM_TOKENS)


@pytest.fixture
async def servers(monkeypatch, tmp_path) -> AsyncIterator[Servers]:
    monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", "a secret of sixteen characters")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = f"127.0.0.2:{free_port('127.0.0.2')}"
    roles = (("--kv-transfer-listen", peer), *[("--kv-transfer-peers", peer)] * 2)
    async with started([Command(*SERVE, *words) for words in roles]) as made:
        yield made


@asynccontextmanager
async def started(commands: list[Command]) -> AsyncIterator[Servers]:
    """A server for prompts, and others for answers, with a router in front."""
    try:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(timeout=timeout) as client:
            made = Servers(commands, client)
            made.route()
            await made.ready()
            yield made
    finally:
        for command in commands:
            if command.process.returncode is None:
                command.kill()


def kind(number: int) -> tuple[str, dict[str, Any]]:
    """A request with a long prompt that no other number has."""
    path, fields = KINDS[number % len(KINDS)]
    text = f"{number} times " + "the sea and the sky " * 12
    if "messages" in fields:
        return path, {**fields, "messages": [{"role": "user", "content": text}]}
    if isinstance(fields["prompt"], list):
        return path, {**fields, "prompt": [5 + number, *([5, 6, 7] * 60)]}
    return path, {**fields, "prompt": text}


def said(answer: Any) -> Any:
    """What an answer without a stream says."""
    return answer["choices"], answer["usage"]["completion_tokens"]


@pytest.fixture
def namespaces() -> Iterator[tuple[list[str], str, str]]:
    """A command that runs another one in network and PID namespaces of its own, the address there,
    and the one here. Where these may not be made: none, and two addresses of the loopback."""
    number = os.getpid()
    name = f"toolkit-{number}"
    net = f"10.{200 + number % 50}.{number // 50 % 250}"
    made = [
        f"netns add {name}",
        f"link add tk{number}a type veth peer name tk{number}b netns {name}",
        f"addr add {net}.1/30 dev tk{number}a",
        f"link set tk{number}a up",
        f"-n {name} addr add {net}.2/30 dev tk{number}b",
        f"-n {name} link set tk{number}b up",
        f"-n {name} link set lo up",
    ]
    alone = [*["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
        for command in made:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        yield [], "127.0.0.3", "127.0.0.2"
    else:
        yield ["ip", "netns", "exec", name, *alone], f"{net}.2", f"{net}.1"
    with suppress(OSError):
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


async def test_two_namespaces(monkeypatch, tmp_path, namespaces):
    """Engines that share nothing but a network, as those of two machines: all blocks go over
    TCP."""
    under, there, here = namespaces
    monkeypatch.setenv("TOOLKIT_LM_KV_TRANSFER_SECRET", "a secret of sixteen characters")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    peer = f"{here}:{free_port(here)}"
    commands = [
        Command(*SERVE, "--kv-transfer-listen", peer),
        Command(*SERVE, "--kv-transfer-peers", peer, "--host", there, under=under),
    ]
    async with started(commands) as servers:
        prefill, decode, router = servers.urls
        for number in range(len(KINDS)):
            routed = await servers.stream(router, number)
            # The prefill server has computed the prompt itself.
            assert routed == await servers.stream(prefill, number)
        loads = await servers.loads()
        assert loads.pop("loaded") == len(KINDS)
        assert not any(loads.values())
        shared = await servers.metric(decode, "kv_transfer_shared_blocks_total")
        fetched = await servers.metric(decode, "kv_transfer_fetched_blocks_total")
        assert fetched > 0 and shared == (0 if under else fetched)


async def test_prompts_of_another_server(servers):
    """Streams, answers at once, and requests of a client that sends each prompt twice: all blocks
    are fetched, through memory, since the servers are on one machine."""
    prefill, decode, lone, router = servers.urls
    for number in range(len(KINDS)):
        routed = await servers.stream(router, number)
        assert routed == await servers.stream(lone, number)
        path, fields = kind(number + len(KINDS))
        routed = await servers.post(router, path, fields)
        assert said(routed) == said(await servers.post(lone, path, fields))
        path, fields = kind(number + 2 * len(KINDS))
        first = {**fields, "max_tokens": 1, "n": 1, "kv_transfer_params": _OFFER}
        params = (await servers.post(prefill, path, first))["kv_transfer_params"]
        second = await servers.post(decode, path, {**fields, "kv_transfer_params": params})
        assert said(second) == said(await servers.post(lone, path, fields))
    loads = await servers.loads()
    assert loads.pop("loaded") == 3 * len(KINDS)
    assert not any(loads.values())
    for name in ("fetched_blocks_total", "shared_blocks_total"):
        numbers = [await servers.metric(url, f"kv_transfer_{name}") for url in servers.urls[1:3]]
        assert sum(numbers) > 0
        assert sum(numbers) == await servers.metric(prefill, "kv_transfer_sent_blocks_total")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_server_that_dies(servers, role):
    """Under load, at any point of a transfer: no answer is lost or wrong."""
    *_, lone, router = servers.urls
    victim = ("prefill", "decode").index(role)
    numbers = range(100, 100 + 2 * _NUM_KILLED)
    asking = [asyncio.create_task(servers.stream(router, n)) for n in numbers[:_NUM_KILLED]]
    await servers.until(lambda: servers.figure("inflight", servers.urls[victim]))
    servers.commands[victim].send(signal.SIGSTOP)
    asking += [asyncio.create_task(servers.stream(router, n)) for n in numbers[_NUM_KILLED:]]
    await servers.until(lambda: servers.figure("inflight", servers.urls[victim]))
    servers.commands[victim].kill()
    found = await asyncio.gather(*asking)
    assert found == [await servers.stream(lone, number) for number in numbers]
    assert await servers.stream(router, 200) == await servers.stream(lone, 200)
