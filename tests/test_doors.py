"""Listening sockets in each way to run a server: the table of docs/security.md has exactly
these."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import httpx
import psutil
import pytest
from faulty_server import FLAGS, PROGRAM, Server, wait_for
from listening import Listener, listeners, shared_memory
from ports import free_port
from processes import wait_until_gone

DOCS = Path(__file__).parents[1] / "docs"
KEY = "a secret of the two nodes"
MOST_DOORS = 256
ENGINE = ("tiny", "--dtype", "float32", "--device", "cpu")


def generator():
    spec = importlib.util.spec_from_file_location("generate_doors", DOCS / "generate_doors.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


doors = generator()
PROCESSES = {
    "server": r"toolkit-lm serve|serve tiny",
    "render server": r"toolkit-lm render|render tiny",
    "router": r"toolkit-lm route|route --backend",
    "shared engine": r"engine tiny .*--listen",
    "engine": r"toolkit-lm engine|engine\.process\.main",
    "rank": r"toolkit-lm worker \d|executor_mp\.worker import",
    "node": r"main\(\) worker --node-rank|ray::NodeActor",
    "Ray's agents": r"ray::(DashboardAgent|RuntimeEnvAgent)",
    "Ray's monitors": r"ray/.*(monitor|dashboard)\.py",
    "Ray's gcs_server, raylet and workers": r"gcs_server|raylet|ray::",
}
"""Parts of a process's title or command; the first that fits names it."""


def process_of(listener: Listener) -> str:
    title = listener.title
    if re.search(PROCESSES["Ray's monitors"], title):
        return "Ray's monitors"
    return next((name for name, words in PROCESSES.items() if re.search(words, title)), title)


def check(topology: str, found: list[Listener]) -> None:
    """Each listener is in the table, and each row of the table listens."""
    rows = {
        (door.process, door.kind, door.reach) for door in doors.DOORS if topology in door.topologies
    }
    listening = {(process_of(one), one.kind, one.reach): one for one in found}
    assert listening.keys() - rows == set(), [listening[one] for one in listening.keys() - rows]
    assert rows - listening.keys() == set(), found


@pytest.fixture
def serve(tmp_path_factory):
    servers = []
    # A short name: paths of sockets have room for no longer one.
    folder = tmp_path_factory.mktemp("d")
    plugin = folder / "plugin"
    plugin.mkdir()

    def start(*arguments: str, **environ: str) -> Server:
        servers.append(Server(plugin, folder / f"s{len(servers)}", *arguments, **environ))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()


@contextmanager
def beside(*words: str, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """Another command of `toolkit`."""
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def of(*processes: subprocess.Popen[bytes]) -> list[Listener]:
    return listeners([psutil.Process(one.pid) for one in processes])


def answers(server: Server) -> None:
    server.wait_ready()
    assert server.post({"prompt": "Once", "max_tokens": 2, "ignore_eos": True}).status_code == 200


ALONE = {
    "one process": ["--no-engine-process"],
    "engine process": [],
    "tensor parallel": ["--tensor-parallel-size", "2"],
    "pipeline parallel": ["--pipeline-parallel-size", "2"],
    "data parallel": ["--data-parallel-size", "2"],
    "KV events": [
        *("--plugin-option", "kv_events.enabled=true"),
        *("--plugin-option", "kv_events.endpoint=tcp://127.0.0.1:{}"),
        *("--plugin-option", "kv_events.replay_endpoint=tcp://127.0.0.1:{}"),
    ],
    "KV transfer": ["--kv-transfer-listen", "127.0.0.1:{}"],
}
AT_NIGHT = ("engine process", "pipeline parallel")
"""Their processes are among those of data and of tensor parallelism."""


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(name, marks=pytest.mark.nightly)
        if name in AT_NIGHT
        else pytest.param(name, marks=() if name == "tensor parallel" else pytest.mark.slow)
        for name in ALONE
    ],
)
def test_a_server(serve, topology):
    environ = {"TOOLKIT_LM_KV_TRANSFER_SECRET": KEY} if topology == "KV transfer" else {}
    server = serve(*(word.format(free_port()) for word in ALONE[topology]), **environ)
    answers(server)
    check(topology, of(server.process))
    assert shared_memory([psutil.Process(server.process.pid)]) == set()


def test_shared_memory_with_a_name_is_found():
    memory = SharedMemory(create=True, size=1)
    try:
        assert memory.name in shared_memory([psutil.Process()])
    finally:
        memory.close()
        memory.unlink()
    assert memory.name not in shared_memory([psutil.Process()])


@pytest.mark.slow
def test_nodes(serve):
    master = f"127.0.0.1:{free_port()}"
    environ = {"TOOLKIT_LM_LAUNCH_KEY": KEY}
    server = serve("--pipeline-parallel-size", "2", "--nodes", "2", "--master", master, **environ)
    with beside("worker", "--node-rank", "1", "--master", master, **environ) as node:
        answers(server)
        found = of(server.process, node)
        check("nodes", found)
        # Who connects meanwhile to what is open cannot do more than that.
        for one in found:
            host, _, port = one.address.rpartition(":")
            if one.kind == "tcp" and process_of(one) == "engine" and one.reach != "nobody":
                strangers = []
                for _ in range(MOST_DOORS):
                    strangers.append(socket.create_connection((host, int(port)), 5))
                    strangers[-1].sendall(b"GET / HTTP/1.1\r\n\r\n")
                answers(server)
                for stranger in strangers:
                    stranger.close()


def is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.slow
def test_a_remote_renderer(serve):
    port = free_port()
    with beside("render", *FLAGS, "--port", str(port)) as renderer:
        wait_for(lambda: is_healthy(port), 60)
        server = serve("--renderer-url", f"http://127.0.0.1:{port}")
        answers(server)
        check("remote renderer", of(server.process, renderer))


@pytest.mark.slow
def test_a_router(serve):
    server = serve()
    answers(server)
    port = free_port()
    with beside("route", "--backend", server.url, "--port", str(port)) as router:
        wait_for(lambda: is_healthy(port), 60)
        check("router", of(server.process, router))


@pytest.mark.slow
def test_fronts(serve, tmp_path_factory):
    folder = tmp_path_factory.mktemp("f")
    path = folder / "socket"
    words = ("engine", *ENGINE, "--listen", str(path))
    with beside(*words, TMPDIR=str(folder)) as engine:
        wait_for(lambda: path.exists(), 60)
        servers = [serve("--plugin-option", f"fronts.engine={path}") for _ in range(2)]
        for server in servers:
            answers(server)
        check("fronts", of(engine, *(server.process for server in servers)))
        # Others of the machine are kept out wherever the socket is.
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_ray(serve):
    """A local cluster is reached by nobody on the network, and all of it ends with the server,
    whatever ends that."""
    pytest.importorskip("ray")
    folders = set(Path("/tmp").glob("ray-*"))
    server = serve(
        "--executor",
        "ray",
        "--tensor-parallel-size",
        "2",
        "--plugin-option",
        "executor_ray.address=local",
    )
    wait_for(lambda: server.status() == 200 or server.process.poll() is not None, 200)
    answers(server)
    check("Ray", of(server.process))
    assert shared_memory([psutil.Process(server.process.pid)]) == set()
    processes = psutil.Process(server.process.pid).children(recursive=True)
    server.process.kill()
    server.process.wait(30)
    wait_until_gone(*processes)
    wait_for(
        lambda: (
            set(Path("/tmp").glob("ray-*")) <= folders
            and not list((server.folder / "tmp").iterdir())
        ),
        30,
    )


def test_the_page_has_the_table():
    assert doors.PAGE.read_text(encoding="utf-8") == doors.page(), (
        "security.md is out of date: run python docs/generate_doors.py"
    )


def test_every_topology_has_a_test():
    assert set(doors.TOPOLOGIES) == {*ALONE, "nodes", "Ray", "remote renderer", "router", "fronts"}
