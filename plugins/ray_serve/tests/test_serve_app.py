"""The app on a Ray cluster: its answers are one engine's, whatever becomes of the engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import psutil
import pytest
from continued import KINDS, SERVE, Command, ask
from processes import descendants
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError
from toolkit_lm_ray_serve import serve_app

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
]
TIMEOUT = aiohttp.ClientTimeout(total=300)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def alone():
    """The address of one engine's server."""
    command = Command(*SERVE)
    yield command.url()
    command.kill()


@pytest.fixture
def serving(port):
    """A function (options) that serves an app, and gives its address."""
    from ray import serve

    def run(**options: Any) -> str:
        serve.run(serve_app({"model": "tiny", "kernels": "cpu", **options}))
        return f"http://127.0.0.1:{port}"

    yield run
    serve.delete("default")


def num_engines() -> dict[str, int]:
    """Numbers of engines, by Ray Serve's states."""
    from ray import serve

    states = serve.status().applications["default"].deployments["engine"].replica_states
    return {str(getattr(state, "value", state)): number for state, number in states.items()}


def engines() -> list[psutil.Process]:
    """The replicas' processes."""
    return descendants("ray::ServeReplica:default:engine")


async def until(condition: Callable[[], bool]) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end, num_engines()
        await asyncio.sleep(0.2)


class Fronts:
    """The fronts of an app. Their figures are told by whichever Ray Serve asks: of those that are
    as busy, a random one."""

    def __init__(self, client: aiohttp.ClientSession, url: str, number: int) -> None:
        self.client = client
        self.url = url
        self.number = number

    async def by_front(self, name: str) -> list[Counter[str]]:
        """A figure of each front, by backend."""
        found: dict[str, Counter[str]] = {}
        async with asyncio.timeout(300):
            while len(found) < self.number:
                async with self.client.get(f"{self.url}/metrics") as answer:
                    text = await answer.text()
                front = re.search(r'router="([^"]*)"', text)
                assert (front is None) == (self.number == 1)
                lines = re.findall(rf"^toolkit_lm_router_{name}({{.*}})? (\S+)$", text, re.M)
                found[front[1] if front else ""] = made = Counter()
                for labels, value in lines:
                    backend = re.search(r'backend="([^"]*)"', labels)
                    made[backend[1] if backend else ""] += float(value)
        return [found[front] for front in sorted(found)]

    async def figure(self, name: str) -> Counter[str]:
        """A figure of all fronts together, by backend."""
        return sum(await self.by_front(name), Counter())

    async def settled(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Waits until only an engine that is stopped has streams, so that no more of them end."""
        while True:
            # Ray Serve asks the less busy of several fronts, so those are not asked here.
            loads = await self.figure("inflight") if self.number == 1 else ()
            before = sum(task.done() for task in tasks)
            await asyncio.sleep(2 * self.number)
            if len(loads) <= 1 and before == sum(task.done() for task in tasks):
                return

    async def ready(self) -> list[str]:
        """The engines' URLs, once each front has two."""
        async with asyncio.timeout(300):
            while True:
                found = [+figure for figure in await self.by_front("ready")]
                if all(len(figure) == 2 and figure == found[0] for figure in found):
                    return [*found[0]]
                await asyncio.sleep(0.1)

    async def cached(self, url: str, prompt: str) -> int:
        """Tokens of a prompt that were cached."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 2, "ignore_eos": True}
        headers = {"Authorization": "Bearer between"}
        path = f"{url}/v1/completions"
        async with self.client.post(path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    async def check_session(self) -> None:
        """One engine has all requests of a session, whichever front they come to."""
        before = await self.by_front("requests_total")
        headers = {"X-Session-ID": "Anna's"}
        for number in range(16):
            body = {"prompt": str(number), "temperature": 0, "max_tokens": 2}
            path = f"{self.url}/v1/completions"
            async with self.client.post(path, json=body, headers=headers) as answer:
                assert answer.status == 200
        found = [
            now - then
            for now, then in zip(await self.by_front("requests_total"), before, strict=True)
        ]
        assert all(figure.total() > 0 for figure in found), found
        assert len(sum(found, Counter())) == 1, found

    async def check_events(self, name: str) -> None:
        """Each front finds what was sent to an engine beside it."""
        before = await self.by_front("index_chunks")
        texts = [f"{name}{number} tells of the sea and a cat. " * 9 for number in range(4)]
        for number, text in enumerate(texts):
            await self.cached((await self.ready())[number % 2], text)
        async with asyncio.timeout(300):
            while any(
                # Each text has two chunks of 128 bytes.
                now[""] < most[""] + 2 * len(texts)
                for now, most in zip(await self.by_front("index_chunks"), before, strict=True)
            ):
                await asyncio.sleep(0.1)
        hits = await self.figure("prefix_hits_total")
        for text in texts * self.number:
            assert await self.cached(self.url, text + "And then?") > 0
        assert (await self.figure("prefix_hits_total") - hits).total() >= len(texts)
        assert not await self.figure("event_gaps_total")


@pytest.mark.parametrize(
    ("num_streams", "num_fronts"),
    [(8, 1), *(pytest.param(*both, marks=pytest.mark.nightly) for both in [(64, 1), (16, 2)])],
)
async def test_a_replica_killed_under_streams_loses_nothing(
    serving, alone, num_streams, num_fronts
):
    replicas = {"scaling.min_replicas": 2, "scaling.max_replicas": 2}
    own = {"router.kv_events": True, "router.backend_key": "between"}
    url = serving(**replicas, **own, **{"scaling.num_fronts": num_fronts})
    async with aiohttp.ClientSession(timeout=TIMEOUT) as client:
        fronts = Fronts(client, url, num_fronts)
        await fronts.check_events("Anna")
        await fronts.check_session()
        expected = [await ask(client, alone, *kind) for kind in KINDS]
        assert [await ask(client, url, *kind) for kind in KINDS] == expected
        numbers = [number % len(KINDS) for number in range(num_streams)]
        for _ in range(20):
            begun: set[int] = set()
            asking = [
                asyncio.create_task(ask(client, url, *KINDS[kind], begun, number))
                for number, kind in enumerate(numbers)
            ]
            while len(begun) < num_streams * 3 // 4 and not all(task.done() for task in asking):
                await asyncio.sleep(0.001)
            victim = engines()[0]
            os.kill(victim.pid, signal.SIGSTOP)
            await fronts.settled(asking)
            # Only the stopped one has streams. Another round where none of them has begun.
            if begun:
                break
            os.kill(victim.pid, signal.SIGCONT)
            await asyncio.gather(*asking)
        num_begun = len(begun)
        assert num_begun > 0
        os.kill(victim.pid, signal.SIGKILL)
        found = await asyncio.gather(*asking)
        assert found == [expected[number] for number in numbers]
        assert (await fronts.figure("migrations_total")).total() == num_begun
        # Ray Serve starts another one, and the front hears of it.
        await until(lambda: num_engines() == {"RUNNING": 2} and victim not in engines())
        assert await ask(client, url, *KINDS[0]) == expected[0]
        await fronts.check_events("Otto")


def test_fronts_that_would_each_obey_alone_are_refused():
    with pytest.raises(ConfigError, match=r"admin_key: .* one of 2 routers"):
        serve_app({"model": "tiny", "scaling.num_fronts": 2, "router.admin_key": "k"})


@pytest.mark.nightly
async def test_ranks_that_ray_places(serving):
    """The ranks of a replica have a placement group beside it. One that dies takes the engine with
    it, and Ray Serve starts another one, for which there is only room where nothing is left."""
    import ray

    options = {"device": "cpu", "dtype": "float32", "num_kv_blocks": 256}
    with LLM("tiny", kernels="cpu", **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        [expected] = llm.generate("Once upon a time", params, use_tqdm=False)
    url = serving(tensor_parallel_size=2, distributed_executor_backend="ray", **options)
    # The front, the replica and each rank have one of six CPUs.
    await until(lambda: ray.available_resources().get("CPU") == 2)
    ranks = descendants("toolkit-lm worker")
    assert len(ranks) == 2 and len(descendants("NodeActor")) == 1

    async def answer(client: aiohttp.ClientSession) -> str:
        body = {"prompt": "Once upon a time", "max_tokens": 24, "ignore_eos": True}
        async with client.post(f"{url}/v1/completions", json=body | {"temperature": 0}) as found:
            assert found.status == 200, await found.text()
            return (await found.json())["choices"][0]["text"]

    async with aiohttp.ClientSession(timeout=TIMEOUT) as client:
        assert await answer(client) == expected.outputs[0].text
        before = engines()
        ranks[0].kill()
        await until(lambda: num_engines() == {"RUNNING": 1} and engines() != before)
        assert await answer(client) == expected.outputs[0].text
    # Nothing of the dead engine is left.
    await until(lambda: len(descendants("toolkit-lm worker")) == 2)
    await until(lambda: ray.available_resources().get("CPU") == 2)


def check(tasks: list[asyncio.Task[None]]) -> None:
    """Raises what a task has raised."""
    for task in tasks:
        if task.done():
            task.result()


@pytest.mark.nightly
async def test_engines_come_and_go_under_load(serving, alone):
    """1 -> 3 -> 1: no request is lost, refused or answered wrongly."""
    scaling = {"max_replicas": 3, "upscale_delay": 1, "downscale_delay": 3, "max_wait": 0.5}
    url = serving(max_num_seqs=4, scaling=scaling)
    async with aiohttp.ClientSession(timeout=TIMEOUT) as client:
        expected = [await ask(client, alone, *kind) for kind in KINDS]
        most = 1
        is_loaded = True
        num_answers = 0

        async def load(number: int) -> None:
            nonlocal num_answers
            while is_loaded or number == 0:
                kind = num_answers % len(KINDS)
                found = await ask(client, url, *KINDS[kind])
                assert found == expected[kind]
                num_answers += 1
                if not is_loaded:
                    await asyncio.sleep(0.5)

        loads = [asyncio.create_task(load(number)) for number in range(12)]
        try:
            end = time.monotonic() + 300
            while most < 3 and time.monotonic() < end:
                check(loads)
                await asyncio.sleep(0.2)
                most = max(most, num_engines().get("RUNNING", 0))
            assert most == 3, num_engines()
            is_loaded = False
            end = time.monotonic() + 300
            while num_engines() != {"RUNNING": 1} and time.monotonic() < end:
                check(loads)
                await asyncio.sleep(0.2)
            assert num_engines() == {"RUNNING": 1}
            # The last one goes on, to the end.
            assert await asyncio.gather(*loads[1:]) == [None] * 11
            assert not loads[0].done()
            assert num_answers > 12
        finally:
            for task in loads:
                task.cancel()
