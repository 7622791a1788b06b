"""The app on a Ray cluster: its answers are one engine's, whatever becomes of the engines."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import psutil
import pytest
from continued import KINDS, SERVE, Command, ask
from processes import descendants
from toolkit_lm import LLM, SamplingParams
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


async def migrations(client: aiohttp.ClientSession, url: str) -> float:
    async with client.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(
        float(line.split()[-1])
        for line in lines
        if line.startswith("toolkit_lm_router_migrations_total{")
    )


async def settled(client: aiohttp.ClientSession, url: str, tasks: list[asyncio.Task[Any]]) -> None:
    """Waits until only an engine that is stopped has streams, so that no more of them end."""
    while True:
        async with client.get(f"{url}/metrics") as answer:
            loads = re.findall(r"^toolkit_lm_router_inflight\S* (\S+)", await answer.text(), re.M)
        before = sum(task.done() for task in tasks)
        await asyncio.sleep(2)
        if sum(map(float, loads)) == max(map(float, loads)) and before == sum(
            task.done() for task in tasks
        ):
            return


@pytest.mark.parametrize("num_streams", [8, pytest.param(64, marks=pytest.mark.nightly)])
async def test_a_replica_killed_under_streams_loses_nothing(serving, alone, num_streams):
    url = serving(**{"scaling.min_replicas": 2, "scaling.max_replicas": 2})
    async with aiohttp.ClientSession(timeout=TIMEOUT) as client:
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
            await settled(client, url, asking)
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
        assert await migrations(client, url) == num_begun
        # Ray Serve starts another one, and the front hears of it.
        await until(lambda: num_engines() == {"RUNNING": 2} and victim not in engines())
        assert await ask(client, url, *KINDS[0]) == expected[0]


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
