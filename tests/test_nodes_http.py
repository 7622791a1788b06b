"""`toolkit serve --nodes 2` and `toolkit worker`: chats through HTTP over two machines, one of
which dies."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import httpx
import psutil
import pytest
from faulty_server import PROGRAM, RAISES, wait_for
from ports import free_port
from toolkit_lm import LLM, SamplingParams

ADDRESSES = ("10.199.78.1", "10.199.78.2")
KEY = "a secret of the two nodes"
TALK = [{"role": "user", "content": "Tell me of a bird."}]
CHAT = "/v1/chat/completions"
ASKED = {"messages": TALK, "temperature": 0, "max_tokens": 24, "ignore_eos": True}


def run(command: str) -> bool:
    return subprocess.run(command.split(), capture_output=True).returncode == 0


@pytest.fixture
def machines():
    """The address of node 0, and what begins a command that runs on node 1.

    Node 1 has a network namespace of its own, where nothing of node 0 is reached on the loopback
    interface. Where none can be made, both are on that interface.
    """
    name = f"toolkit{os.getpid()}"
    end = f"tkh{os.getpid()}"
    commands = [
        f"ip netns add {name}",
        f"ip link add {end}a type veth peer name {end}b netns {name}",
        f"ip addr add {ADDRESSES[0]}/24 dev {end}a",
        f"ip link set {end}a up",
        f"ip -n {name} addr add {ADDRESSES[1]}/24 dev {end}b",
        f"ip -n {name} link set {end}b up",
        f"ip -n {name} link set lo up",
    ]
    is_made = os.geteuid() == 0 and shutil.which("ip") is not None and all(map(run, commands))
    try:
        yield (ADDRESSES[0], ["ip", "netns", "exec", name]) if is_made else ("127.0.0.1", [])
    finally:
        if shutil.which("ip") is not None:
            run(f"ip link del {end}a")
            run(f"ip netns del {name}")


class Worker:
    """`toolkit worker` on node 1."""

    def __init__(self, master: str, prefix: list[str], plugin: os.PathLike[str], log) -> None:
        path = os.pathsep.join(filter(None, [str(plugin), os.environ.get("PYTHONPATH")]))
        environ = {
            **os.environ,
            "TOOLKIT_LM_LAUNCH_KEY": KEY,
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        }
        words = ["worker", "--node-rank", "1", "--master", master, "--start-timeout", "60"]
        words += ["--node-timeout", "60"]
        self.process = subprocess.Popen(
            [*prefix, sys.executable, *PROGRAM, *words],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def rank(self) -> psutil.Process:
        """The process of its one rank."""
        [found] = psutil.Process(self.process.pid).children()
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


@pytest.fixture
def worker(faulty, tmp_path, machines):
    """worker(master): a `Worker`, whose processes are killed at the end of the test."""
    started = []
    with (tmp_path / "worker.log").open("w") as log:

        def start(master: str) -> Worker:
            started.append(Worker(master, machines[1], faulty, log))
            return started[-1]

        yield start
    for one in started:
        one.kill()


def said(server) -> str:
    response = server.post(ASKED, CHAT)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def broken_off(server, kill) -> dict[str, str]:
    """The error that ends a stream of a chat during which `kill` was called. Nothing waits for
    long, nor for `--node-timeout`."""
    body = {**ASKED, "max_tokens": 400, "stream": True}
    with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        kill()
        start = time.monotonic()
        events = [line.removeprefix("data: ") for line in lines if line]
        assert time.monotonic() - start < 30
    assert events.pop() == "[DONE]"
    return json.loads(events[-1])["error"]


@pytest.mark.slow
def test_chats_over_two_machines_one_of_which_dies(serve, worker, machines, tmp_path):
    """Requests during the failure end with the root cause, /health reports it, and with
    --restart-engine the engine comes back with the node."""
    with LLM("tiny", dtype="float32", device="cpu") as llm:
        [alone] = llm.chat(
            TALK, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), use_tqdm=False
        )
    master = f"{machines[0]}:{free_port(machines[0])}"
    flags = [
        "--tensor-parallel-size",
        "2",
        "--nodes",
        "2",
        "--master",
        master,
        "--start-timeout",
        "60",
        "--node-timeout",
        "60",
        "--restart-engine",
        "1",
    ]
    node = worker(master)
    host = re.escape(socket.gethostname())
    server = serve(*flags, TOOLKIT_LM_LAUNCH_KEY=KEY).wait_ready()
    assert said(server) == alone.outputs[0].text
    # One request fails, on the rank that is told; the others go on.
    failed = server.post({"prompt": [RAISES, RAISES], "max_tokens": 2})
    assert failed.status_code == 500
    assert re.search(
        r"cannot stand this token .*on rank [01] of node [01] ", failed.json()["error"]["message"]
    )
    assert said(server) == alone.outputs[0].text

    left = node.rank()
    error = broken_off(server, node.process.kill)
    assert error["code"] in ("engine_dead", "engine_restarting")
    assert re.search(
        rf"node 1 \({host}, process {node.process.pid}\) has gone in step \d+", error["message"]
    )
    # Without a node there is no engine: it waits for the next one.
    health = server.get("/health")
    assert (health.status_code, health.json()["status"], server.status("/live")) == (
        503,
        "restarting",
        200,
    )
    _, alive = psutil.wait_procs([left], 30)
    assert alive == []
    node = worker(master)
    server.wait_ready()
    assert said(server) == alone.outputs[0].text
    assert server.figures()["engine_restarts_total"] == 1

    rank = node.rank()
    error = broken_off(server, rank.kill)
    assert (error["code"], server.status("/health")) in (
        ("engine_dead", 503),
        ("engine_dead", None),
    )
    assert re.search(
        rf"the worker of rank 1 \(process {rank.pid}\) has died .*killed by SIGKILL.* \(node 1 "
        rf"\({host}, ",
        error["message"],
    )
    code, log = server.end()
    assert code == 1
    assert "the worker of rank 1" in log.splitlines()[-1], log
    assert node.process.wait(30) == 1
    wait_for(server.has_left_nothing, 30)
    assert "the worker of rank 1" in (tmp_path / "worker.log").read_text()
