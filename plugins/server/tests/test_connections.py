"""Connections of a real HTTP server in this process, over a fake engine: their options, bounds and
ends."""

from __future__ import annotations

import asyncio
import errno
import json
import resource
import socket
import time
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.app import create_app
from toolkit_lm_server.limits.connections import Counted, HttpServer
from toolkit_lm_server.listening import bind
from toolkit_lm_server.metrics import Metrics
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
COMPLETE = "/v1/completions"
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n"
)
GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
SOON = 8
"""Seconds: many times what is asked takes on a busy machine, and less than any timeout of the
server by default (10 and more)."""


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_answers_do_not_wait_for_acknowledgements(host):
    """Nagle's algorithm and delayed acknowledgements would hold the second part of an answer back
    for 40 ms."""
    accepted = asyncio.get_running_loop().create_future()
    listener = bind(host, 0)
    async with await asyncio.start_server(
        lambda reader, writer: accepted.set_result(writer), sock=listener
    ):
        _, client = await asyncio.open_connection(*listener.getsockname()[:2])
        writer = await accepted
        assert (
            writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        )
        writer.close()
        client.close()


class Client:
    """A connection of a client, byte by byte."""

    def __init__(self, reader, writer) -> None:
        self.reader = reader
        self.writer = writer

    async def ask(self, data: bytes) -> tuple[int, dict]:
        """The answer's status and body."""
        self.writer.write(data)
        return await self.answer()

    async def answer(self) -> tuple[int, dict]:
        async with asyncio.timeout(30):
            head = await self.reader.readuntil(b"\r\n\r\n")
            [length] = [
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            ]
            return int(head.split()[1]), json.loads(await self.reader.readexactly(length))

    @property
    def ended(self) -> bool:
        """Whether the server has ended the connection, by FIN or by RST. A reset leaves no
        end-of-file behind."""
        return self.reader.at_eof() or self.writer.is_closing()

    async def end(self) -> float:
        """Seconds until the server ends the connection."""
        start = time.monotonic()
        async with asyncio.timeout(30):
            try:
                while await self.reader.read(2**16):
                    pass
            except ConnectionError:
                pass
        return time.monotonic() - start


class Running:
    """A server that runs in this event loop."""

    def __init__(self, server: HttpServer, port: int) -> None:
        self.server = server
        self.port = port
        self.clients: list[Client] = []
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)

    async def connect(self, data: bytes = b"") -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        client.writer.write(data)
        self.clients.append(client)
        return client

    @property
    def num_connections(self) -> int:
        return len(self.server.server_state.connections)

    async def health(self) -> float:
        """Seconds until /health and /metrics have answered, on connections of their own."""
        start = time.monotonic()
        for path in ("/health", "/metrics"):
            async with httpx.AsyncClient() as one:
                assert (await one.get(f"http://127.0.0.1:{self.port}{path}")).status_code == 200
        return time.monotonic() - start


@pytest.fixture
def running(engine):
    """running(app, **options): a context with a server of the app, or of the fake engine's."""

    @asynccontextmanager
    async def run(app=None, **options):
        made = ServerOptions(log_level="critical", access_log=False, **options)
        listener = bind("127.0.0.1", 0)
        server = HttpServer(app or create_app(engine, made, metrics=Metrics()), made)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        one = Running(server, listener.getsockname()[1])
        try:
            yield one
        finally:
            for client in one.clients:
                client.writer.close()
            await one.http.aclose()
            server.should_exit = True
            await serving

    return run


async def until(condition, seconds=30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_new_connection_takes_the_place_of_the_longest_idle_one(running):
    async with running(max_connections=8) as one:
        clients = [await one.connect() for _ in range(8)]
        assert (await clients[0].ask(GET))[0] == 200
        # Now the second is idle for longest.
        latest = await one.connect()
        assert (await latest.ask(GET))[0] == 200
        assert await clients[1].end() < SOON
        assert [(await client.ask(GET))[0] for client in (clients[0], *clients[2:], latest)] == [
            200
        ] * 8
        assert one.num_connections == 8


async def test_idle_connections_keep_nobody_out(running):
    async with running(max_connections=20) as one:
        for _ in range(200):
            await one.connect(b"POST /v1/completions HTTP/1.1\r\n")
        assert await one.health() < SOON
        assert (await one.http.post(COMPLETE, json={"prompt": "ab"})).json()["choices"][0][
            "text"
        ] == "AB"
        assert one.num_connections <= 20


async def test_too_many_requests_under_way(running):
    async with running(max_connections=8) as one:
        busy = [await one.connect(HEAD + b"\r\n") for _ in range(8)]
        await until(lambda: one.num_connections == 8)
        await until(
            lambda: not any(client.is_idle for client in one.server.server_state.connections)
        )
        reply = await one.http.post(COMPLETE, json={"prompt": "ab"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "server_busy")
        assert (reply.headers["connection"], "retry-after" in reply.headers) == ("close", True)
        for _ in range(200):
            await one.connect(HEAD + b"\r\n")
        assert await one.health() < SOON
        assert one.num_connections <= 8 + 32
        for client in busy:
            client.writer.close()
        await until(lambda: one.num_connections < 8)
        assert (await one.http.post(COMPLETE, json={"prompt": "ab"})).status_code == 200


async def test_descriptors_that_run_out_cost_no_time(running, monkeypatch):
    """Whoever else takes them: the server tries once a second, and says so once."""
    async with running() as one:
        said = []
        accept = socket.socket.accept

        def fails(listener):
            if len(said) < 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return accept(listener)

        monkeypatch.setattr(socket.socket, "accept", fails)
        loop = asyncio.get_running_loop()
        before = loop.get_exception_handler()
        loop.set_exception_handler(lambda loop, context: said.append(context["message"]))
        try:
            start = time.monotonic()
            client = await one.connect(GET)
            assert (await client.answer())[0] == 200
            assert time.monotonic() - start > 1.5
            assert said == ["socket.accept() out of system resource"] * 2
        finally:
            loop.set_exception_handler(before)


@pytest.mark.parametrize(
    ("options", "sent", "status"),
    [
        ({"header_timeout": 1}, b"", None),
        ({"header_timeout": 1}, b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n", 408),
        ({"body_timeout": 1}, HEAD + b'\r\n{"prompt": ', 408),
        ({"body_timeout": 1}, HEAD + b"Expect: 100-continue\r\n\r\n", 408),
        ({"keep_alive_timeout": 1}, GET, 200),
    ],
    ids=["nothing", "head", "body", "100-continue", "keep-alive"],
)
async def test_a_client_that_takes_too_long(running, options, sent, status):
    async with running(**options) as one:
        start = time.monotonic()
        client = await one.connect(sent)
        if b"Expect" in sent:
            await client.reader.readuntil(b"\r\n\r\n")
        if status is not None:
            found, body = await client.answer()
            assert found == status and (found == 200 or body["error"]["code"] == "request_timeout")
        await client.end()
        assert 0.8 < time.monotonic() - start < SOON
        assert await one.health() < SOON


@pytest.mark.parametrize("part", ["head", "body"])
async def test_drops_do_not_extend_the_time(running, part):
    """Slowloris: a byte now and then."""
    async with running(header_timeout=1, body_timeout=1) as one:
        client = await one.connect(HEAD if part == "head" else HEAD + b"\r\n")
        start = time.monotonic()
        for _ in range(100):
            if client.ended:
                break
            client.writer.write(b"x" if part == "body" else b"x: y\r\n")
            await asyncio.sleep(0.1)
        assert await client.end() + time.monotonic() - start < SOON


async def test_a_body_that_comes_after_its_refusal(running):
    """The answer is complete, and still the rest of the body must come in time."""
    async with running(body_timeout=1, api_key="secret") as one:
        client = await one.connect(HEAD + b"\r\n")
        assert (await client.answer())[0] == 401
        start = time.monotonic()
        while not client.ended and time.monotonic() - start < SOON:
            client.writer.write(b"x")
            await asyncio.sleep(0.1)
        assert time.monotonic() - start < SOON


@pytest.mark.parametrize(
    "headers",
    [
        b"".join(b"x-%d: y\r\n" % number for number in range(200)),
        b"x: " + b"y" * 10_000 + b"\r\n",
        b"x: " + b"y" * 10_000,
    ],
    ids=["many", "large", "endless"],
)
async def test_headers_have_bounds(running, headers):
    async with running(max_header_size="4KiB") as one:
        client = await one.connect(
            b"GET /version HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n"
        )
        status, body = await client.answer()
        assert (status, body["error"]["code"]) == (431, "headers_too_large")
        assert await client.end() < SOON


async def test_what_is_not_http(running):
    async with running() as one:
        client = await one.connect(b"\x16\x03\x01\r\n\r\n")
        status, body = await client.answer()
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")
        assert await client.end() < SOON


CHUNKED = "Transfer-Encoding: chunked"
LENGTH = "Content-Length: 4"


@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", [LENGTH, CHUNKED]),
        ("1.1", [CHUNKED, LENGTH]),
        ("1.1", [CHUNKED, "Content-Length: 0"]),
        ("1.0", [CHUNKED]),
        ("1.0", [CHUNKED, "Connection: keep-alive"]),
        ("1.0", [LENGTH, CHUNKED]),
        ("1.1", [LENGTH, "Content-Length: 5"]),
        ("1.1", ["Content-Length: +4"]),
        ("1.1", ["Content-Length: 4, 5"]),
        ("1.1", [CHUNKED, CHUNKED]),
        ("1.1", ["Transfer-Encoding: gzip, chunked"]),
        ("1.1", ["Transfer-Encoding: identity"]),
        ("1.1", ["Transfer-Encoding : chunked"]),
        ("1.1", ["Transfer-Encoding: chunked\r\n , identity"]),
        ("1.1", ["X: \rContent-Length: 4"]),
    ],
)
async def test_a_body_whose_end_is_not_clear_ends_the_connection(running, version, headers):
    """What follows it could be read as a request of its own, behind a proxy that takes another
    end."""
    head = "\r\n".join(
        [f"POST /tokenize HTTP/{version}", "Host: localhost", *headers, "", ""]
    ).encode()
    async with running() as one:
        client = await one.connect(head + b"0\r\n\r\n" + GET)
        status, answer = await client.answer()
        assert 400 <= status < 500 or status == 501, answer
        assert await client.reader.read() == b"", "the second request has no answer"
        assert (await one.http.get("/version")).status_code == 200


async def test_a_client_that_does_not_read(running):
    """What is sent to it stays small, and the request ends."""
    sent = []
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        gone = asyncio.create_task(receive())
        while not gone.done():
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
            sent.append(10_000)
            await asyncio.sleep(0)
        ended.set()

    async with running(app, write_timeout=1) as one:
        start = time.monotonic()
        # asyncio's reader would read.
        with socket.create_connection(("127.0.0.1", one.port)) as client:
            client.sendall(GET)
            async with asyncio.timeout(SOON):
                await ended.wait()
            assert 0.8 < time.monotonic() - start < SOON
            assert sum(sent) < 20_000_000
        assert one.num_connections == 0


@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_reads_a_little_now_and_then(running, streams):
    """It is as good as gone, though it always reads on: the request ends."""
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        gone = asyncio.create_task(receive())
        while not gone.done() and streams:
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})
            await asyncio.sleep(0)
        if not streams:
            await send({"type": "http.response.body", "body": b"x" * 20_000_000})
        ended.set()

    async with running(app, write_timeout=1) as one:
        await until(lambda: one.server.started)
        one.server.bounded.least_read = 10**6
        # With little room in the kernel, the server soon notices what is read.
        one.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(("127.0.0.1", one.port))
            client.sendall(GET)
            client.setblocking(False)
            await until(lambda: one.num_connections == 1)
            async with asyncio.timeout(30):
                while one.num_connections:
                    with suppress(BlockingIOError, ConnectionError):
                        client.recv(5000)
                    await asyncio.sleep(0.1)
        assert ended.is_set()


@pytest.mark.parametrize(("reads", "lives"), [(0, False), (20, False), (400, True)])
async def test_comments_are_no_progress_of_a_client_that_does_not_read_them(running, reads, lives):
    """Only what is read counts: what is written beside it, a little now and then, keeps no
    connection."""
    ended = asyncio.Event()

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await receive()
        gone = asyncio.create_task(receive())
        await send({"type": "http.response.body", "body": b"x" * 60_000, "more_body": True})
        while not gone.done():
            await send(
                {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
            )
            await asyncio.sleep(0.05)
        ended.set()

    async with running(app, write_timeout=2) as one:
        await until(lambda: one.server.started)
        one.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            client.connect(("127.0.0.1", one.port))
            client.sendall(GET)
            client.setblocking(False)
            start = time.monotonic()
            while not ended.is_set() and time.monotonic() - start < (4.5 if lives else SOON):
                with suppress(BlockingIOError, ConnectionError):
                    client.recv(reads) if reads else None
                await asyncio.sleep(0.05)
            assert ended.is_set() is not lives


async def test_a_slow_client_is_served(running):
    """Slow is not gone: it reads a little, now and then, for longer than the timeout."""
    size = 20_000_000

    async def app(scope, receive, send):
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % size)],
            }
        )
        await send({"type": "http.response.body", "body": b"x" * size})

    async with running(app, write_timeout=1) as one:
        start = time.monotonic()
        client = await one.connect(GET)
        await client.reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            left -= len(await client.reader.readexactly(min(left, 2_000_000)))
            await asyncio.sleep(0.2)
        assert time.monotonic() - start > 2


async def test_the_end_does_not_wait_for_connections(running):
    async with running() as one:
        for sent in (b"", HEAD, HEAD + b"\r\n", GET) * 5:
            await one.connect(sent)
        await asyncio.sleep(0.2)
        start = time.monotonic()
        one.server.bounded.abort()
    assert time.monotonic() - start < SOON


def test_the_default_follows_from_the_descriptors(monkeypatch):
    for soft, most in (
        (32, 4),
        (64, 24),
        (1024, 744),
        (10**6, 10_000),
        (resource.RLIM_INFINITY, 10_000),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, soft))
        assert ServerOptions().num_connections == most
    assert ServerOptions(max_connections=5).num_connections == 5
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    with pytest.raises(
        ConfigError,
        match=r"max_connections is 1000, but the open files of this process .* allow 960",
    ):
        ServerOptions(max_connections=1000)


class FakeTransport:
    """Records what is sent."""

    def __init__(self) -> None:
        self.calls: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.calls.append(bytes(data))

    def close(self) -> None:
        self.calls.append("close")

    def abort(self) -> None:
        self.calls.append("abort")

    def get_write_buffer_size(self) -> int:
        return 0


async def test_parts_that_are_written_together_are_sent_together():
    transport = FakeTransport()
    counted = Counted(transport)
    for part in (b"head", b"", b"body", b"end"):
        counted.write(part)
    assert (transport.calls, counted.get_write_buffer_size(), counted.num_taken) == ([], 11, 0)
    await asyncio.sleep(0)
    assert (transport.calls, counted.num_taken) == ([b"headbodyend"], 11)
    counted.writelines([b"x", b"y"])
    counted.close()
    assert transport.calls[1:] == [b"xy", "close"]
    counted.write(b"lost")
    counted.abort()
    await asyncio.sleep(0)
    assert transport.calls[3:] == ["abort"]


async def test_a_large_part_does_not_wait():
    """An app that never waits is told to pause."""
    transport = FakeTransport()
    counted = Counted(transport)
    for _ in range(5):
        counted.write(bytes(2**15))
    assert [len(call) for call in transport.calls] == [2**16, 2**16]
    await asyncio.sleep(0)
    assert [len(call) for call in transport.calls] == [2**16, 2**16, 2**15]
