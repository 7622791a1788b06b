"""Which render server is asked, and what becomes of one that fails."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import msgspec
import pytest
from toolkit_lm.errors import ContextLengthError, RequestError
from toolkit_lm_renderer_remote.errors import BadAnswerError, UnreachableError
from toolkit_lm_renderer_remote.reading import Answer
from toolkit_lm_renderer_remote.servers import RenderServers

GOOD = httpx.Response(200, json={"token_ids": [5]})
REFUSAL = {"error": {"message": "the prompt is empty.", "param": "prompt", "code": None}}


class Content(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Content as it comes from a server, for either kind of client."""

    def __init__(self, content):
        self.content = content

    def __iter__(self):
        yield self.content

    async def __aiter__(self):
        yield self.content


def servers(**answers):
    """Servers http://a, http://b, ... and the list of those that were asked. An answer is a
    response, an error or a function."""
    asked = []

    def answer(request):
        asked.append(request.url.host)
        given = answers[request.url.host]
        if isinstance(given, Exception):
            raise given
        found = given() if callable(given) else given
        return httpx.Response(
            found.status_code, headers=found.headers, stream=Content(found.content)
        )

    made = RenderServers(
        [f"http://{name}" for name in answers], transport=httpx.MockTransport(answer)
    )
    return made, asked


@pytest.fixture(params=["waiting", "awaited"])
def ask(request):
    """ask(servers): the token ids of their answer, in either way to ask."""

    def asked(made, path="/path", most=10_000, **options):
        if request.param == "waiting":
            return made.ask(path, b"{}", Answer.prompt, most=most, **options).token_ids
        return asyncio.run(
            made.ask_async(path, b"{}", Answer.prompt, most=most, **options)
        ).token_ids

    return asked


def test_they_take_turns(ask):
    made, asked = servers(a=GOOD, b=GOOD, c=GOOD)
    for _ in range(6):
        assert ask(made) == [5]
    assert asked[:3] == asked[3:]
    assert set(asked) == {"a", "b", "c"}


FAILURES = {
    "cannot be reached": httpx.ConnectError("no"),
    "is too slow": httpx.ReadTimeout("slow"),
    "takes no connection": httpx.ConnectTimeout("slow"),
    "has an error": httpx.Response(500),
    "wants a key": httpx.Response(401, json=REFUSAL),
    "knows no such route": httpx.Response(404, json=REFUSAL),
    "sends elsewhere": httpx.Response(302, headers={"location": "http://c"}),
    "answers with a page": httpx.Response(200, html="<p>Welcome"),
    "answers with anything": httpx.Response(200, json={"token_ids": "five"}),
    "answers too much": httpx.Response(
        200, content=b"[" + b"5," * 10_000, headers={"content-type": "application/json"}
    ),
    "refuses without a reason": httpx.Response(400, text="no"),
    "is busy": httpx.Response(503),
}


@pytest.mark.parametrize("how", FAILURES)
def test_the_next_one_is_asked_where_one_fails(how, ask):
    made, asked = servers(a=FAILURES[how], b=GOOD)
    for _ in range(4):
        assert ask(made) == [5]
    rests = how not in ("is busy", "refuses without a reason")
    assert asked.count("a") == (1 if rests else 2)


@pytest.mark.parametrize(
    "how", ["cannot be reached", "is too slow", "takes no connection", "is busy"]
)
def test_none_answers(how, ask):
    made, asked = servers(a=FAILURES[how], b=FAILURES[how])
    with pytest.raises(
        UnreachableError, match=r"2 render servers gave no answer; .* Try again later"
    ) as error:
        ask(made)
    assert error.value.http_status == 503
    assert sorted(asked) == ["a", "b"]
    assert "http://" not in str(error.value)


@pytest.mark.parametrize(
    "how",
    ["has an error", "wants a key", "answers with a page", "answers too much", "sends elsewhere"],
)
def test_no_answer_can_be_used(how, ask):
    made, _ = servers(a=FAILURES[how])
    with pytest.raises(BadAnswerError, match="the render server gave no usable answer") as error:
        ask(made)
    assert error.value.http_status == 502


def test_what_is_wrong_with_a_request_is_told_at_once(ask):
    made, asked = servers(a=httpx.Response(400, json=REFUSAL), b=httpx.Response(400, json=REFUSAL))
    with pytest.raises(RequestError, match=r"^the prompt is empty\.$") as error:
        ask(made)
    assert error.value.param == "prompt"
    assert len(asked) == 1
    made, _ = servers(
        a=httpx.Response(
            400, json={"error": {"message": "long", "code": "context_length_exceeded"}}
        )
    )
    with pytest.raises(ContextLengthError):
        ask(made)


@pytest.mark.parametrize("declared", [{}, {"content-length": "20001"}])
def test_an_answer_that_may_be_large_and_is_too_large_blames_the_request(declared, ask):
    large = httpx.Response(
        200, content=b"[" + b"5," * 10_000, headers={"content-type": "application/json", **declared}
    )
    made, asked = servers(a=large, b=large)
    for _ in range(4):
        with pytest.raises(RequestError, match="the media are too large"):
            ask(made, too_large="the media are too large")
    assert sorted(asked) == ["a", "a", "b", "b"], "none rests, and no other is asked"


def test_a_connection_that_breaks_off_is_tried_once_more(ask):
    answers = iter([httpx.ReadError("gone"), GOOD])

    def flaky():
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    made, asked = servers(a=flaky)
    assert ask(made) == [5]
    assert asked == ["a", "a"]
    made, asked = servers(a=httpx.RemoteProtocolError("gone"), b=GOOD)
    for _ in range(3):
        assert ask(made) == [5]
    assert asked.count("a") == 2


def test_a_loop_that_stood_still_blames_no_server(ask):
    """Connections time out unseen while a loop does other work: they are made again."""
    made, asked = servers(a=lambda: next(answers)())
    made._connect = 0.01

    def stood_still():
        time.sleep(0.2)
        raise httpx.ConnectTimeout("late")

    answers = iter([stood_still, lambda: GOOD])
    assert ask(made) == [5]
    assert asked == ["a", "a"]
    made, asked = servers(a=httpx.ConnectTimeout("in time"))
    with pytest.raises(UnreachableError, match="it took no connection within 2 s"):
        ask(made)
    assert asked == ["a"]


class Odd(BaseHTTPRequestHandler):
    """A server that answers without an end, or slowly."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        if self.path == "/gzip":
            self.send_header("Content-Encoding", "gzip")
        if self.path == "/declared":
            self.send_header("Content-Length", str(2**40))
        self.end_headers()
        part, pause = (b" ", 0.1) if self.path == "/slow" else (b" " * 2**16, 0)
        try:
            while not self.server.over.wait(pause):
                self.wfile.write(part)
        except OSError:
            pass

    def log_message(self, *_):
        pass


@pytest.fixture
def odd():
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.over = threading.Event()
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.over.set()
        server.shutdown()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/endless", BadAnswerError),
        ("/declared", BadAnswerError),
        ("/gzip", BadAnswerError),
        ("/slow", UnreachableError),
    ],
)
def test_no_answer_is_read_without_an_end(odd, path, kind, ask):
    start = time.perf_counter()
    with pytest.raises(kind):
        ask(RenderServers([odd], timeout=1), path, most=2**20)
    assert time.perf_counter() - start < 8


def test_its_key_is_sent(ask):
    seen = []

    def answer(request):
        seen.append(request.headers)
        content = Content(msgspec.msgpack.encode({"token_ids": [5]}))
        return httpx.Response(200, stream=content, headers={"content-type": "application/msgpack"})

    made = RenderServers(["http://a/v1/"], api_key="secret", transport=httpx.MockTransport(answer))
    assert ask(made) == [5]
    assert seen[0]["authorization"] == "Bearer secret"
    assert seen[0]["accept-encoding"] == "identity"
    assert seen[0]["accept"].startswith("application/msgpack")


class Slow(BaseHTTPRequestHandler):
    """A server that answers once it is let. It counts who waits, and notes who has left."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        self.rfile.read(int(self.headers["Content-Length"]))
        with server.lock:
            server.waiting += 1
            server.most = max(server.most, server.waiting)
        while not server.let.wait(0.02):
            self.connection.setblocking(False)
            try:
                gone = self.connection.recv(1) == b""
            except BlockingIOError:
                gone = False
            finally:
                self.connection.setblocking(True)
            if gone:
                server.left.release()
                break
        with server.lock:
            server.waiting -= 1
        content = b'{"token_ids": [5]}'
        try:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:
            self.close_connection = True

    def log_message(self, *_):
        pass


class SlowServer(ThreadingHTTPServer):
    request_queue_size = 256
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Slow)
        self.let = threading.Event()
        self.left = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.waiting = 0
        self.most = 0
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def slow():
    with SlowServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.let.set()
        server.shutdown()


def names():
    """The threads of this process that are not the slow server's."""
    return [one.name for one in threading.enumerate() if "process_request" not in one.name]


async def until(holds):
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it does not come to that")


def test_who_awaits_holds_no_thread(slow):
    async def main():
        made = RenderServers([slow.url])
        ask = partial(made.ask_async, "/path", b"{}", Answer.prompt, most=10_000)
        before = len(names())
        asked = [asyncio.ensure_future(ask()) for _ in range(200)]
        # The maximum number of connections; the others wait for theirs, and this does not count
        # against the server's timeout.
        await until(lambda: slow.waiting == 128)
        assert len(names()) == before
        slow.let.set()
        assert [one.token_ids for one in await asyncio.gather(*asked)] == [[5]] * 200
        assert slow.most == 128

    asyncio.run(main())


def test_cancelling_closes_the_connection(slow):
    async def main():
        made = RenderServers([slow.url])
        asked = asyncio.ensure_future(made.ask_async("/path", b"{}", Answer.prompt, most=10_000))
        await until(lambda: slow.waiting == 1)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await asyncio.to_thread(slow.left.acquire, timeout=30), (
            "the server has not seen it leave"
        )
        slow.let.set()
        assert (await made.ask_async("/path", b"{}", Answer.prompt, most=10_000)).token_ids == [5]

    asyncio.run(main())


def test_connections_are_kept_for_a_loop_and_closed_at_its_end(slow):
    slow.let.set()
    made = RenderServers([slow.url])
    clients = []

    async def main():
        for _ in range(3):
            assert (await made.ask_async("/path", b"{}", Answer.prompt, most=10_000)).token_ids == [
                5
            ]
        [own] = made._connections._by_loop.values()
        clients.append(own.client)
        assert len(own.client._transport._pool.connections) == 1

    for _ in range(2):
        asyncio.run(main())
    assert clients[0] is not clients[1]
    assert all(client.is_closed for client in clients)
    assert not made._connections._by_loop
