"""Tests of faults around a server: bad requests among good ones, clients that leave, engines
that hang or die, signals.

The servers are processes of their own that run the model `tiny` in float32, with a plugin that
fails on demand.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from faulty_server import DIES, HANGS, NANS, RAISES, Server, good, wait_for
from toolkit_lm_server.completions import CompletionBody
from toolkit_lm_server.protocol import ChatBody

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def server(faulty, tmp_path_factory):
    """One server for all tests that it is to survive."""
    one = Server(
        faulty,
        tmp_path_factory.mktemp("server"),
        "--max-num-seqs",
        "16",
        "--kv-cache-memory",
        "0.9",
    )
    try:
        yield one.wait_ready()
        one.process.send_signal(signal.SIGTERM)
        code, log = one.end()
        assert code == 0, log
        wait_for(one.has_left_nothing, 30)
    finally:
        one.kill()


# Bad requests

JUNK = [
    True,
    "",
    "x",
    "\ud800",
    [],
    [None],
    {},
    {"a": {"b": [1, {"c": "d"}]}},
    -1,
    0.5,
    10**30,
    -1e308,
    float("nan"),
    list(range(5000)),
]
SHORT = {"max_tokens": 2, "timeout": 20}
TEXT = {"prompt": "a", **SHORT}
TALK = {"messages": [{"role": "user", "content": "hi"}], **SHORT}


def fuzzed() -> list[tuple[str, bytes]]:
    """Each field of each route with each piece of junk. What both routes take goes to one of
    them."""
    own = set(ChatBody.model_fields) - set(CompletionBody.model_fields)
    routes = (
        ("/v1/completions", TEXT, [*CompletionBody.model_fields, "unknown"]),
        ("/v1/chat/completions", TALK, sorted(own)),
    )
    return [
        (path, json.dumps({**base, name: junk}).encode())
        for path, base, names in routes
        for name in names
        for junk in JUNK
    ]


def malformed() -> list[tuple[str, bytes]]:
    """Invalid request bodies, invalid prompts, and conversations that templates refuse."""
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"x" * 17_000_000,
    ]
    prompts = [
        [],
        [[]],
        ["a", ""],
        ["a", [1]],
        "x" * 100_000,
        [5] * 600,
        [10**9],
        [-1],
        ["a"] * 300,
    ]
    talks = [
        [],
        [{}],
        [{"role": 5}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "x"}]}],
    ]
    found = [("/v1/completions", body) for body in bodies]
    found += [
        ("/v1/completions", json.dumps({**TEXT, "prompt": prompt}).encode()) for prompt in prompts
    ]
    found += [
        ("/v1/chat/completions", json.dumps({**TALK, "messages": talk}).encode()) for talk in talks
    ]
    kwargs = [{"messages": 5}, {"tools": "x"}, {"add_generation_prompt": {}}]
    found += [
        ("/v1/chat/completions", json.dumps({**TALK, "chat_template_kwargs": one}).encode())
        for one in kwargs
    ]
    found += [
        (path, json.dumps({**TEXT, "model": "gpt-5"}).encode())
        for path in ("/v1/completions", "/tokenize", "/detokenize")
    ]
    return found


FAILING = [
    {"prompt": [RAISES, RAISES]},
    {"prompt": [NANS, NANS]},
    {"prompt": [5, NANS, NANS], "prompt_logprobs": 1},
    *({"prompt": "a", "faulty_how": how} for how in ("add", "raise", "shape", "nan", "after_draw")),
]
"""Requests on which the model or a plugin fails."""


def disturb(server: Server) -> list[int]:
    """Sends one bad request of every kind; returns the status of each answer."""
    bad = fuzzed() + malformed()
    random.Random(0).shuffle(bad)
    headers = {"content-type": "application/json"}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return [client.post(path, content=body, headers=headers).status_code for path, body in bad]


@pytest.mark.slow
def test_one_bad_request_of_every_kind_among_50_good_ones(server):
    expected = [good(server, number) for number in range(25)] * 2
    with ThreadPoolExecutor(20) as pool:
        disturbing = pool.submit(disturb, server)
        failing = [pool.submit(server.post, {**SHORT, **body}) for body in FAILING * 2]
        leaving = [pool.submit(leave, server, stage, body) for stage in STAGES for body in LEAVING]
        goods = [pool.submit(good, server, number) for number in list(range(25)) * 2]
        assert [one.result() for one in goods] == expected
        statuses = disturbing.result()
        assert set(statuses) <= {200, 400, 404, 413}, {
            status: statuses.count(status) for status in statuses
        }
        assert statuses.count(400) > 400
        errors = [
            (one.result().status_code, one.result().json()["error"]["code"]) for one in failing
        ]
        assert errors == [(500, "model_error")] * len(failing)
        for one in leaving:
            one.result()
    assert server.status("/health") == 200
    wait_for(server.is_idle)
    assert [good(server, number) for number in range(5)] == expected[:5]


# Clients that leave

BODY = {"max_tokens": 300, "ignore_eos": True, "temperature": 1}
LEAVING = [
    {"prompt": "a", **BODY},
    {"prompt": "a", "stream": True, **BODY},
    {"prompt": "a", "n": 2, "best_of": 4, **BODY},
    {"prompt": ["a", "b", "c"], "n": 2, **BODY},
    {"prompt": ["a", "b", "c"], "n": 2, "stream": True, **BODY},
]
STAGES = ["head", "body", "sent", "begun", "middle"]


def leave(server: Server, stage: str, body: dict) -> None:
    """Sends a request, and disconnects in the middle of its head or body, at once after it, or some
    time later."""
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    ).encode()
    message = {"head": head[:-10], "body": head + content[:-5]}.get(stage, head + content)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(message)
        if stage in ("begun", "middle"):
            time.sleep({"begun": 0.02, "middle": 0.2}[stage])
        if stage == "middle" and body.get("stream"):
            assert connection.recv(10)


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_leaves_frees_its_blocks(server, stage):
    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(leave, server, stage, body) for body in LEAVING * 3]:
            one.result()
    wait_for(server.is_idle, 30)


def test_a_client_that_leaves_while_it_waits_in_the_queue(server):
    with server.stream(["a"] * 16) as response:
        lines = response.iter_lines()
        next(lines)
        for body in LEAVING:
            leave(server, "sent", body)
            leave(server, "begun", body)
        wait_for(lambda: server.figures()["num_requests_waiting"] == 0, 30)
        assert next(lines) is not None
    wait_for(server.is_idle, 30)
    assert server.figures()['requests_aborted_total{reason="abort"}'] > 0


def test_deadlines(server):
    late = server.post({"prompt": "a", **BODY, "timeout": 1e-4})
    assert (late.status_code, late.json()["error"]["code"]) == (504, "timeout")
    for stream in (False, True):
        body = {
            "prompt": ["a", "b"],
            **BODY,
            "max_tokens": 450,
            "n": 8,
            "timeout": 0.3,
            "stream": stream,
        }
        partial = server.post(body)
        assert partial.status_code == 200
        assert '"finish_reason":"timeout"' in partial.text
    wait_for(server.is_idle, 30)
    assert server.figures()['requests_aborted_total{reason="timeout"}'] == 5


def test_cached_tokens_are_counted(server):
    body = {"prompt": [7] * 40, "max_tokens": 2, "cache_salt": "mine"}
    counts = [
        server.post(body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        for _ in range(2)
    ]
    assert counts == [0, 32]
    other = server.post({**body, "cache_salt": "another's"}).json()
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


# Start, health, end


@pytest.mark.slow
def test_a_server_answers_while_its_engine_starts(serve):
    server = serve(FAULTY_LOADING="1.5")
    wait_for(lambda: server.status("/live") == 200, 30)
    assert server.get("/live").json()["status"] == "starting"
    assert (server.status("/health"), server.status("/metrics")) == (503, 200)
    assert server.post(TEXT).status_code == 200
    server.wait_ready()
    assert server.post(TEXT).status_code == 200
    assert server.get("/health").json() == {"status": "ready"}
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_what_keeps_the_engine_from_starting_is_told(serve):
    code, log = serve(FAULTY_START="1").end()
    assert code == 1
    assert "MemoryError: no room for faulty weights" in log.splitlines()[-1]


def test_too_small_a_cache_is_told_with_the_numbers(serve):
    code, log = serve("--kv-cache-memory", "64KiB").end()
    assert code == 1
    assert "--max-model-len 512" in log.splitlines()[-1] and "64 KiB" in log.splitlines()[-1]


def test_nearly_all_memory_may_be_asked_for(server):
    # The server of this module was told that it may have nine tenths of what is free.
    assert server.post(TEXT).status_code == 200


def test_a_dead_engine_is_told_and_ends_the_server(serve):
    server = serve().wait_ready()
    with server.stream() as under_way:
        lines = under_way.iter_lines()
        next(lines)
        killing = server.post({"prompt": [DIES, DIES], "max_tokens": 2})
        *_, error, _, done, _ = lines
    later = server.post(TEXT)
    assert [one.status_code for one in (killing, later)] == [503, 503]
    for one in (killing.json(), later.json(), json.loads(error.removeprefix("data: "))):
        assert (
            one["error"]["code"] == "engine_dead" and "killed by SIGKILL" in one["error"]["message"]
        )
    assert (done, server.status("/health")) == ("data: [DONE]", 503)
    code, log = server.end()
    assert code == 1
    text = (
        r"error: the engine has died: the engine process \d+ has died: it was killed by SIGKILL; "
        r"perhaps the machine ran out of memory\."
    )
    assert re.fullmatch(text, log.splitlines()[-1])
    wait_for(server.has_left_nothing, 30)


@pytest.mark.slow
def test_a_dead_engine_is_started_anew(serve):
    server = serve("--restart-engine", "1", FAULTY_LOADING="1").wait_ready()
    expected = good(server, 3)
    assert server.post({"prompt": [DIES, DIES], "max_tokens": 2}).status_code == 503
    wait_for(lambda: server.get("/health").json()["status"] == "restarting", 30)
    early = server.post(TEXT)
    assert (server.status("/live"), early.status_code, early.json()["error"]["code"]) == (
        200,
        503,
        "engine_restarting",
    )
    assert "retry-after" in early.headers
    server.wait_ready()
    assert good(server, 3) == expected
    assert server.figures()["engine_restarts_total"] == 1
    server.post({"prompt": [DIES, DIES], "max_tokens": 2})
    assert server.end()[0] == 1


@pytest.mark.slow
def test_an_engine_is_started_anew_when_one_of_its_ranks_is_killed(serve):
    server = serve("--restart-engine", "1", "--tensor-parallel-size", "2").wait_ready()
    expected = good(server, 3)
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.pids()}
    ranks = [
        pid for pid, command in commands.items() if b"worker 1 " in command.replace(b"\0", b" ")
    ]
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGKILL)
    wait_for(lambda: server.status() == 503, 30)
    assert "the worker of rank 1" in server.log.read_text()
    wait_for(lambda: server.status() == 200 and server.figures()["engine_restarts_total"] == 1, 60)
    assert good(server, 3) == expected


@pytest.mark.slow
def test_a_hang_is_told_and_dumps_all_stacks(serve):
    server = serve("--step-timeout", "1").wait_ready()
    with ThreadPoolExecutor() as pool:
        hanging = pool.submit(server.post, {"prompt": [HANGS, HANGS], "max_tokens": 2})
        wait_for(lambda: server.status("/health") == 503, 10)
        assert server.get("/health").json()["status"] == "stalled"
        assert (server.status("/ready"), server.post(TEXT).json()["error"]["code"]) == (
            503,
            "engine_stalled",
        )
        wait_for(lambda: "in forward" in server.log.read_text(), 30)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/ready").json()["status"] == "draining")
        server.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert server.end()[0] == 128 + signal.SIGTERM
        assert time.monotonic() - start < 8
        with pytest.raises(httpx.TransportError):
            hanging.result()
    wait_for(server.has_left_nothing, 30)


def test_health_stays_good_under_load(server):
    with ThreadPoolExecutor(8) as pool:
        loads = [
            pool.submit(
                server.post, {"prompt": [5] * 400, "n": 4, "max_tokens": 30, "ignore_eos": True}
            )
            for _ in range(8)
        ]
        checks = []
        while not all(load.done() for load in loads):
            start = time.monotonic()
            checks.append(
                (server.status("/health"), server.status("/ready"), time.monotonic() - start < 8)
            )
        assert set(checks) == {(200, 200, True)}
        assert {load.result().status_code for load in loads} == {200}


@pytest.mark.slow
def test_a_full_queue_is_429(serve):
    server = serve("--max-num-seqs", "1", "--max-queued-requests", "2").wait_ready()
    with server.stream() as response, ThreadPoolExecutor(6) as pool:
        lines = response.iter_lines()
        next(lines)
        replies = [reply.result() for reply in [pool.submit(server.post, TEXT) for _ in range(6)]]
        refused = [reply for reply in replies if reply.status_code == 429]
        assert len(refused) == 4
        assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
        assert server.figures()['requests_refused_total{status="429"}'] == 4


def test_sigterm_drains(serve):
    server = serve("--shutdown-timeout", "30").wait_ready()
    with server.stream() as response:
        lines = response.iter_lines()
        next(lines)
        # The answer does not end before the server has refused another request.
        [engine] = psutil.Process(server.process.pid).children()
        engine.suspend()
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.status("/ready") == 503)
        late = server.post(TEXT)
        engine.resume()
        assert (late.status_code, late.json()["error"]["code"], "retry-after" in late.headers) == (
            503,
            "server_stopping",
            True,
        )
        *_, last, _, done, _ = lines
    assert (done, json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"]) == (
        "data: [DONE]",
        "length",
    )
    code, log = server.end()
    assert code == 0, log
    wait_for(server.has_left_nothing, 30)


@pytest.mark.parametrize(
    ("number", "phase"),
    [(signal.SIGKILL, phase) for phase in ("importing", "loading", "serving")]
    + [
        (number, phase)
        for number in (signal.SIGINT, signal.SIGTERM)
        for phase in ("importing", "loading")
    ],
)
def test_nothing_survives_the_server(serve, number, phase):
    server = serve(FAULTY_LOADING="30" if phase == "loading" else "0")
    if phase == "loading":
        wait_for(lambda: server.status("/live") == 200, 30)
    elif phase == "serving":
        server.wait_ready()
    else:
        wait_for(lambda: len(server.pids()) >= 2, 30)
    server.process.send_signal(number)
    code = server.process.wait(30)
    assert code == (-number if number == signal.SIGKILL else 0)
    wait_for(server.has_left_nothing, 30)


MOMENTS = (0.2, 0.5, 0.8, 1.2, 1.6, 2, 3, 5)
"""Seconds of a start, which takes about two."""
TOPOLOGIES = [
    (),
    ("--no-engine-process",),
    ("--data-parallel-size", "2"),
    ("--tensor-parallel-size", "2"),
]


@pytest.mark.parametrize(
    ("arguments", "moments"),
    # Each moment of one topology, and a quarter of the moments of each; all of all at night.
    [
        pytest.param(one, MOMENTS[number::4], marks=pytest.mark.slow)
        for number, one in enumerate(TOPOLOGIES)
    ]
    + [pytest.param(one, MOMENTS, marks=pytest.mark.nightly) for one in TOPOLOGIES],
)
def test_sigterm_at_any_moment_of_the_start_is_an_end_without_error(serve, arguments, moments):
    """From the first of our own code on. Before it, Python itself has no handler yet."""
    for seconds in moments:
        server = serve(*arguments)
        wait_for(
            lambda server=server: (
                b"serve" in Path(f"/proc/{server.process.pid}/cmdline").read_bytes()
            ),
            10,
        )
        wait_for(lambda server=server: _handles(server.process.pid, signal.SIGTERM), 20)
        time.sleep(seconds)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0, (seconds, server.log.read_text())
        wait_for(server.has_left_nothing, 30)


def _handles(pid: int, number: int) -> bool:
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught[1], 16) >> (number - 1) & 1)


# The page


def test_the_page_names_tests_that_exist():
    named = re.findall(r"`([\w/]+\.py)::([\w:]+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert len(named) > 30
    for file, path in named:
        text = (ROOT / file).read_text()
        for name in path.split("::"):
            assert re.search(
                rf"^ *(def|async def|class) {name}\b|^{name} = ", text, re.MULTILINE
            ), f"{file} has no {name}"
