"""Kills a server at any moment, and runs it on a machine that lacks something.

CRASH_MOMENTS=50 tries that many moments of a kill of the front, and some of other kinds.
"""

from __future__ import annotations

import ast
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from faulty_server import Server, good, wait_for

ROOT = Path(__file__).parents[1]
BODY = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
START_SECONDS = 3.0
"""About as long as a start takes, or somewhat longer."""
NUM_MOMENTS = int(os.environ.get("CRASH_MOMENTS", 6))
MOMENTS = [
    0,
    *(pytest.param(number, marks=pytest.mark.slow) for number in range(1, NUM_MOMENTS // 2)),
    *(
        pytest.param(number, marks=pytest.mark.nightly)
        for number in range(max(1, NUM_MOMENTS // 2), NUM_MOMENTS)
    ),
]


def engine_of(server: Server) -> psutil.Process:
    [engine] = psutil.Process(server.process.pid).children()
    return engine


class Load:
    """Clients that ask again and again. What they get is in `answers`: an HTTP status and an
    error's code."""

    def __init__(self, server: Server) -> None:
        self.answers: list[tuple[int, str | None]] = []
        self.lost: list[str] = []
        """Answers that were broken off, and connections that were."""
        self._server = server
        self._ended = threading.Event()

    def run(self, stream: bool) -> None:
        while not self._ended.is_set():
            try:
                self.answers.append(self._ask(stream))
            except (httpx.TransportError, OSError) as error:
                self.lost.append(repr(error))
                time.sleep(0.05)

    def end(self) -> None:
        self._ended.set()

    def _ask(self, stream: bool) -> tuple[int, str | None]:
        response = self._server.post({**BODY, "stream": stream})
        if response.status_code == 503:
            time.sleep(0.1)
        if response.status_code != 200 or not stream:
            return response.status_code, response.json().get("error", {}).get("code")
        *events, done = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        assert done == "[DONE]"
        return 200, json.loads(events[-1]).get("error", {}).get("code")


@contextmanager
def load_on(server: Server) -> Iterator[Load]:
    load = Load(server)
    with ThreadPoolExecutor(4) as pool:
        clients = [pool.submit(load.run, number % 2 == 0) for number in range(4)]
        try:
            yield load
        finally:
            load.end()
        for client in clients:
            client.result()


# Kills


@pytest.mark.parametrize("number", MOMENTS)
def test_a_kill_of_the_front_at_any_moment_leaves_nothing(serve, number):
    server = serve()
    with load_on(server):
        time.sleep(random.Random(number).uniform(0, 1.5 * START_SECONDS))
        server.process.kill()
        server.process.wait(30)
        wait_for(server.has_left_nothing, 30)


@pytest.mark.slow
@pytest.mark.timeout(60 + 20 * NUM_MOMENTS)
def test_a_kill_of_the_engine_at_any_moment_is_told_and_mended(serve):
    num_kills = NUM_MOMENTS // 2
    server = serve("--restart-engine", str(num_kills)).wait_ready()
    expected = good(server, 3)
    delays = random.Random(0)
    with load_on(server) as load:
        for number in range(1, num_kills + 1):
            time.sleep(delays.uniform(0.1, 1))
            engine_of(server).kill()
            wait_for(lambda count=number: server.figures()["engine_restarts_total"] == count, 10)
            # On a machine with other work a start takes many times as long.
            wait_for(lambda: server.status() == 200, 90)
            assert good(server, 3) == expected
    assert load.lost == []
    # A stream that has begun is 200.
    assert set(load.answers) <= {
        (200, None),
        (200, "engine_dead"),
        (503, "engine_dead"),
        (503, "engine_restarting"),
    }
    assert {"engine_dead", "engine_restarting"} <= {code for _, code in load.answers}
    wait_for(server.is_idle)
    assert [path.name for path in (server.folder / "tmp").iterdir()] == []


@pytest.mark.parametrize("number", MOMENTS[: NUM_MOMENTS // 3])
def test_sigterm_at_any_moment_ends_all_streams(serve, number):
    server = serve("--shutdown-timeout", "1").wait_ready()
    with load_on(server) as load:
        time.sleep(random.Random(number).uniform(0, 1))
        start = time.monotonic()
        num_answers = len(load.answers)
        server.process.send_signal(signal.SIGTERM)
        code, log = server.end()
        assert time.monotonic() - start < 8
    assert code == 0, log
    # The server answers whom it has heard; then nobody listens.
    assert all(
        "ConnectError" in one or "ReadError" in one or "without sending" in one for one in load.lost
    ), load.lost
    assert {code for _, code in load.answers[num_answers:]} <= {
        None,
        "engine_dead",
        "server_stopping",
    }
    wait_for(server.has_left_nothing, 30)


def test_a_stopped_engine_stalls_and_goes_on(serve):
    server = serve("--step-timeout", "0.5").wait_ready()
    expected = good(server, 3)
    engine = engine_of(server)
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(server.post, {**BODY, "max_tokens": 400})
        wait_for(lambda: server.figures()["num_sequences_running"] == 1)
        engine.suspend()
        wait_for(lambda: server.status("/health") == 503)
        assert server.get("/health").json()["status"] == "stalled"
        assert server.post(BODY).json()["error"]["code"] == "engine_stalled"
        engine.resume()
        wait_for(lambda: server.status("/health") == 200)
        assert (
            asked.result().status_code,
            asked.result().json()["usage"]["completion_tokens"],
        ) == (200, 400)
    assert good(server, 3) == expected
    engine.suspend()
    server.process.kill()
    server.process.wait(30)
    wait_for(server.has_left_nothing, 30)


def test_deadlines_hold_while_the_engine_is_stopped(serve):
    server = serve().wait_ready()
    expected = good(server, 3)
    engine = engine_of(server)
    long = {**BODY, "max_tokens": 450, "n": 8}
    with ThreadPoolExecutor() as pool:
        asked = [
            pool.submit(server.post, {**long, **more})
            for more in ({"timeout": 3}, {"timeout": 3, "stream": True}, {})
        ]
        wait_for(lambda: server.figures()["num_sequences_running"] == 24)
        engine.suspend()
        early = server.post({**BODY, "timeout": 0.1})
        assert (early.status_code, early.json()["error"]["code"]) == (504, "timeout")
        *partial, other = asked
        for one in partial:
            assert one.result().status_code == 200
            assert one.result().text.count('"finish_reason":"timeout"') == 8
        assert not other.done()
        engine.resume()
        assert (
            other.result().status_code,
            other.result().json()["usage"]["completion_tokens"],
        ) == (200, 8 * 450)
    wait_for(server.is_idle)
    assert server.figures()['requests_aborted_total{reason="timeout"}'] == 3
    assert good(server, 3) == expected


WALL_CLOCKS = {"time", "time_ns", "now", "utcnow", "today", "fromtimestamp", "localtime", "gmtime"}
"""Attributes that read it, of `time`, `datetime` and `date`."""


def test_only_what_people_read_is_told_by_the_wall_clock():
    """A jump of the wall clock moves no deadline. Dates in answers, reports and templates, the
    epoch of spans, ages of files, names of traces, the days that batches are kept, dates of models'
    states and named prefixes, and vLLM's figure of adapters and events of the KV cache are told by
    it."""
    found = set()
    for path in (
        path
        for pattern in ("core/src", "libs/*/src", "plugins/*/src", "contrib_*/*/src")
        for path in ROOT.glob(f"{pattern}/**/*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in WALL_CLOCKS
                and ast.unparse(node.value) in ("time", "datetime", "date")
            ):
                found.add((path.name, ast.unparse(node)))
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                found |= {(path.name, f"time.{name.name}") for name in node.names}
    assert found == {
        ("app.py", "time.time"),
        ("cache.py", "time.time"),
        ("chat.py", "datetime.now"),
        ("conversation_store.py", "time.time"),
        ("dispatch.py", "datetime.now"),
        ("environment.py", "datetime.now"),
        ("generation.py", "time.time"),
        ("hub.py", "datetime.fromtimestamp"),
        ("lifecycle.py", "time.time"),
        ("listing.py", "datetime.fromtimestamp"),
        ("listing.py", "time.time"),
        ("log.py", "datetime.fromtimestamp"),
        ("metrics.py", "time.time"),
        ("named.py", "time.time"),
        ("output.py", "datetime.now"),
        ("output.py", "time.time"),
        ("pooled.py", "time.time"),
        ("profiling.py", "time.time_ns"),
        ("publisher.py", "time.time"),
        ("records.py", "time.time"),
        ("report.py", "datetime.now"),
        ("spans.py", "time.time_ns"),
        ("watch.py", "time.time"),
    }


# Missing resources


@contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """Mounts a file system that holds ten files."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=11", "tmpfs", folder],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system: {done.stderr}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        for number in range(100):
            (folder / f"file{number}").touch()


def test_a_restart_without_a_temporary_folder_is_told(serve):
    server = serve("--restart-engine", "1").wait_ready()
    shutil.rmtree(server.folder / "tmp")
    engine_of(server).kill()
    code, log = server.end()
    assert code == 1
    assert "the folder of the engine's socket cannot be made" in log.splitlines()[-1]
    assert (
        "No such file or directory" in log.splitlines()[-1] and "Set TMPDIR" in log.splitlines()[-1]
    )
    wait_for(lambda: not server.pids(), 30)


def test_a_full_disk_harms_nobody(serve):
    """Disk that a dead engine held is enough for the next one."""
    server = serve("--restart-engine", "1")
    with small_disk(server.folder / "tmp"):
        server.wait_ready()
        expected = good(server, 3)
        fill(server.folder / "tmp")
        assert good(server, 3) == expected
        engine_of(server).kill()
        wait_for(lambda: server.figures()["engine_restarts_total"] == 1)
        server.wait_ready()
        assert good(server, 3) == expected
        server.process.terminate()
        assert server.end()[0] == 0


def test_another_temporary_folder_is_taken(serve, tmp_path):
    """Where this one is full. In test_environments it is missing."""
    folder = tmp_path / "full"
    folder.mkdir()
    with small_disk(folder):
        fill(folder)
        assert good(serve(TMPDIR=str(folder)).wait_ready(), 3)


def limit(kind: int, value: int):
    return lambda: resource.setrlimit(kind, (value, value))


@pytest.mark.parametrize("number", [pytest.param(64, marks=pytest.mark.nightly), 32])
def test_few_file_descriptors(serve, number):
    server = serve(before=limit(resource.RLIMIT_NOFILE, number)).wait_ready()
    expected = good(server, 3)
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * number)]
    for one in connections:
        one.setblocking(False)
    # Those that are too many are closed; the others wait for a request.
    wait_for(lambda: sum(is_closed(one) for one in connections) > number)
    assert not all(is_closed(one) for one in connections)
    # asyncio would wait for a second, and then log thousands of tracebacks.
    time.sleep(1.5)
    log = server.log.read_text()
    assert "Traceback" not in log and len(log.splitlines()) < 10
    for one in connections:
        one.close()
    wait_for(lambda: server.status() == 200)
    assert good(server, 3) == expected


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
def test_little_memory_of_the_engine_ends_the_start(serve):
    """Not of the front: where a new thread finds no room, Python waits for it for ever."""
    server = serve()
    wait_for(lambda: len(server.pids()) > 1, 10)
    [engine] = [pid for pid in server.pids() if pid != server.process.pid]
    resource.prlimit(engine, resource.RLIMIT_AS, (450 * 2**20, 450 * 2**20))
    code, log = server.end()
    assert code == 1
    assert f"error: the engine process {engine} has died while importing" in log.splitlines()[-1]
    wait_for(server.has_left_nothing, 30)


# Where it runs


@pytest.mark.parametrize(
    "environ",
    [
        {
            "HOME": "/proc/nowhere",
            "XDG_CACHE_HOME": "/proc/nowhere",
            "LC_ALL": "C",
            "LANG": "tr_TR.UTF-8",
            "TMPDIR": "/proc/nowhere",
        },
        pytest.param(
            {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "LANGUAGE": "tr"},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["no home, no temporary folder and no locale", "Turkish"],
)
def test_environments(serve, environ):
    server = serve("--served-model-name", "Iıü", **environ).wait_ready()
    reply = server.post({"prompt": "I ı ü 😀", "max_tokens": 2, "echo": True, "model": "Iıü"})
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["text"].startswith("I ı ü 😀")
    server.process.terminate()
    code, log = server.end()
    assert code == 0
    assert log.startswith("Serving Iıü at ")


def test_without_a_home():
    code = (
        "import os, sys; del os.environ['HOME']; from toolkit_lm_cli import run; "
        "sys.exit(run(['explain', 'tiny', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plugin"] == "decoder"


def is_open_to_all(path: Path) -> bool:
    """Whether other users may read a file and enter the folders above it."""
    return bool(path.stat().st_mode & 0o4) and all(one.stat().st_mode & 0o1 for one in path.parents)


def become_nobody() -> None:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)


def test_another_user(serve):
    """It may read the code, and write nowhere but into a temporary folder."""
    if os.getuid() != 0:
        pytest.skip("only root can start processes of another user")
    code = [
        Path(sys.executable).resolve(),
        Path(os.__file__),
        Path(psutil.__file__),
        Path(__file__),
    ]
    if closed := [str(path) for path in code if not is_open_to_all(path)]:
        pytest.skip(f"other users cannot read {closed}")
    server = serve(
        before=become_nobody, TMPDIR="/tmp", PYTHONPATH=os.environ.get("PYTHONPATH", ""), HOME="/"
    ).wait_ready()
    assert psutil.Process(server.process.pid).uids().real == engine_of(server).uids().real == 65534
    assert good(server, 3)


IMPORTED = """
import pathlib
pathlib.Path(__file__).with_name("imported").touch()
raise ImportError("this is not the module that was meant")
"""


def test_modules_of_the_working_folder_are_not_imported(serve, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    for name in (
        "torch",
        "json",
        "numpy",
        "socket",
        "typing",
        "msgspec",
        "toolkit_lm",
        "sitecustomize",
    ):
        (folder / f"{name}.py").write_text(IMPORTED)
    program = [Path(sys.executable).with_name("toolkit")]
    done = subprocess.run(
        [sys.executable, *program, "--help"], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert good(serve(program=program, cwd=folder).wait_ready(), 3)
    assert not (folder / "imported").exists()


def test_a_second_server_on_the_port_harms_nobody(serve):
    server = serve().wait_ready()
    expected = good(server, 3)
    second = serve("--port", str(server.port))
    code, log = second.end()
    assert code == 2
    assert log.splitlines() == [
        f"error: cannot listen on 127.0.0.1 port {server.port}: Address already in use. "
        "Is another server running there? --port 0 takes a free port."
    ]
    assert good(server, 3) == expected
    wait_for(second.has_left_nothing, 30)
