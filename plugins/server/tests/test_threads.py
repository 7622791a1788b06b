"""Threads that clients share."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import copy_context

import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import hookimpl
from toolkit_lm_server import json_body
from toolkit_lm_server.app import create_app
from toolkit_lm_server.caller import CALLER, Caller
from toolkit_lm_server.lifecycle import Lifecycle
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.threads import SharedThreads, usable_cores


class Work:
    """Pieces of work that end when they are told to, in the order in which they began."""

    def __init__(self, threads: SharedThreads) -> None:
        self.threads = threads
        self.begun: list[str] = []
        self.changed = threading.Condition()
        self.go_on = threading.Semaphore(0)

    def submit(self, client: str):
        def run() -> str:
            with self.changed:
                self.begun.append(client)
                self.changed.notify()
            assert self.go_on.acquire(timeout=30)
            return client

        context = copy_context()
        context.run(CALLER.set, Caller(client=client))
        return context.run(self.threads.submit, run)

    def wait_begun(self, count: int) -> str:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, 30)
            return "".join(self.begun)


def test_a_client_leaves_half_of_the_cores_to_others(monkeypatch):
    monkeypatch.setattr("toolkit_lm_server.threads.usable_cores", lambda: 4)
    with SharedThreads(8) as threads:
        work = Work(threads)
        flood = [work.submit("a") for _ in range(10)]
        assert work.wait_begun(2) == "aa"
        small = work.submit("b")
        assert work.wait_begun(3) == "aab"
        work.go_on.release(11)
        assert [one.result(30) for one in (*flood, small)] == ["a"] * 10 + ["b"]


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        (
            "0::/a/b",
            {"cpu.max": "max 100000", "a/cpu.max": "250000 100000", "a/b/cpu.max": "400000 100000"},
            3,
        ),
        ("0::/", {"cpu.max": "50000 100000\n"}, 1),
        (
            "5:memory:/a\n4:cpu,cpuacct:/a",
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "150000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            2,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 6),
        ("0::/", {"cpu.max": "nonsense"}, 6),
        ("0::/", {}, 6),
    ],
)
def test_cores_are_those_that_the_process_may_use(monkeypatch, tmp_path, group, files, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    (tmp_path / "own").write_text(group)
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    assert usable_cores(tmp_path / "groups", tmp_path / "own") == cores
    assert usable_cores(tmp_path, tmp_path / "none") == 6


def test_clients_take_turns_where_threads_are_few():
    with SharedThreads(1) as threads:
        work = Work(threads)
        every = [work.submit(client) for client in "aaaabbc"]
        work.wait_begun(1)
        work.go_on.release(7)
        assert [one.result(30) for one in every] == list("aaaabbc") and "".join(
            work.begun
        ) == "abcabaa"


def test_what_is_cancelled_is_not_begun_and_what_fails_raises():
    with SharedThreads(1) as threads:
        work = Work(threads)
        first, second, third = (work.submit("a") for _ in range(3))
        work.wait_begun(1)
        assert second.cancel()
        work.go_on.release(2)
        assert (first.result(30), third.result(30), work.begun) == ("a", "a", ["a", "a"])
        failed = threads.submit(int, "x")
        with pytest.raises(ValueError, match="invalid literal"):
            failed.result(30)
        assert threads.submit(int, "5").result(30) == 5


def test_nothing_is_kept_of_clients_that_have_left():
    with SharedThreads(4) as threads:
        work = Work(threads)
        work.go_on.release(30)
        for one in [work.submit(f"{number % 10}") for number in range(30)]:
            one.result(30)
    assert not threads._turns and not threads._waiting


@pytest.mark.anyio
async def test_work_of_a_request_is_its_clients(client, monkeypatch):
    found = []
    parse = json_body._parse

    def told(body, most):
        found.append(CALLER.get().client)
        return parse(body, most)

    monkeypatch.setattr(json_body, "_parse", told)
    asyncio.get_running_loop().set_default_executor(SharedThreads(2))
    assert (
        await client.post("/v1/completions", json={"prompt": "a", "user": "a" * 100_000})
    ).status_code == 200
    assert found == ["127.0.0.1"]


class Waiting:
    """A plugin whose handlers are plain functions."""

    name = "waiting"

    @hookimpl
    def toolkit_register_routes(self, router, engine):
        @router.get("/thread")
        def thread(size: int = 1) -> list[str]:
            return [threading.current_thread().name[:17], CALLER.get().client] * size

        @router.get("/generated")
        def generated() -> Iterator[int]:
            yield from (1, 2)


@pytest.mark.anyio
async def test_plain_functions_of_plugins_run_in_them(make_engine, client_of):
    asyncio.get_running_loop().set_default_executor(SharedThreads(2))
    app = create_app(make_engine([Waiting()]), ServerOptions(routes=["waiting"]))
    async with client_of(app) as client:
        assert (await client.get("/thread?size=1")).json() == ["toolkit_lm-shared", "127.0.0.1"]
        assert (await client.get("/thread?size=x")).status_code == 400
        assert (await client.get("/generated")).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})]
)
async def test_the_tokenizer_runs_in_them(make_engine, client_of, monkeypatch, path, body):
    found = []
    engine = make_engine()
    asyncio.get_running_loop().set_default_executor(SharedThreads(2))
    for name in ("render_prompt", "decode"):
        own = getattr(engine.renderer, name)
        monkeypatch.setattr(
            engine.renderer,
            name,
            lambda *given, own=own, **how: (
                found.append(threading.current_thread().name),
                own(*given, **how),
            )[1],
        )
    async with client_of(create_app(engine)) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert len(found) == 1 and found[0].startswith("toolkit_lm-shared")


def test_a_server_has_such_threads():
    making: Future = Future()
    making.set_exception(ConfigError("this is far enough"))

    async def name() -> str:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            pytest.raises(ConfigError, match="far enough"),
        ):
            await Lifecycle(making, create_app, ServerOptions(), Metrics(), listener).run()
        return await asyncio.to_thread(lambda: threading.current_thread().name)

    assert asyncio.run(name()).startswith("toolkit_lm-shared")


def test_who_waits_for_others_keeps_no_core_busy():
    """A client may have half of the threads, however few cores there are."""
    with SharedThreads(8, waiting=True) as threads:
        together = threading.Barrier(5)
        futures = [threads.submit(together.wait, 10) for _ in range(4)]
        together.wait(10)
        assert len({future.result(30) for future in futures}) == 4
