"""Fetches from a server on this machine, and the addresses that no fetch goes to."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from ipaddress import ip_address

import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_media import addresses
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.source import load_bytes

NAME = "images.example.com"
PUBLIC = "93.184.216.34"
SOON = 8
"""Seconds: many times what it takes on a busy machine, and less than servers and look-ups take that
have no end."""
Row = tuple[int, int, int, str, tuple[str, int]]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers by path. `seen` has the headers of each request."""

    protocol_version = "HTTP/1.1"
    seen: list[dict[str, str]] = []

    def do_GET(self) -> None:
        Handler.seen.append({key.lower(): value for key, value in self.headers.items()})
        self.close_connection = True
        # Clients hang up on purpose here.
        with contextlib.suppress(OSError):
            getattr(self, "answer_" + self.path.strip("/").partition("/")[0])()

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def answer_good(self) -> None:
        self.send(200, b"picture", Content_Length="7")

    def answer_open(self) -> None:
        self.send(200, b"picture")

    def answer_chunked(self) -> None:
        self.send(200, b"3\r\npic\r\n4\r\nture\r\n0\r\n\r\n", Transfer_Encoding="chunked")

    def answer_empty(self) -> None:
        self.send(200, b"", Content_Length="0")

    def answer_missing(self) -> None:
        self.send(404, b"secret", Content_Length="6")

    def answer_short(self) -> None:
        self.send(200, b"pic", Content_Length="7")

    def answer_gzip(self) -> None:
        self.send(200, b"picture", Content_Length="7", Content_Encoding="gzip")

    def answer_long(self) -> None:
        self.send(200, b"", Content_Length="1000000000")

    def answer_endless(self) -> None:
        self.send(200)
        while True:
            self.wfile.write(bytes(10_000))

    def answer_drip(self) -> None:
        self.send(200, b"", Content_Length="900")
        self.drip(b"a")

    def answer_head(self) -> None:
        self.wfile.write(b"HTTP/1.1 200 OK\r\n")
        self.drip(b"X")

    def drip(self, byte: bytes) -> None:
        for _ in range(1000):
            self.wfile.write(byte)
            time.sleep(0.05)

    def answer_garbage(self) -> None:
        self.wfile.write(b"garbage\r\n\r\n")

    def answer_once(self) -> None:
        self.send(302, b"", Location="/good", Content_Length="0")

    def answer_again(self) -> None:
        self.send(302, b"", Location="/again", Content_Length="0")

    def answer_nowhere(self) -> None:
        self.send(302, b"", Content_Length="0")

    def answer_to(self) -> None:
        self.send(307, b"", Location=self.path.removeprefix("/to/"), Content_Length="0")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    Handler.seen = []
    yield server.server_port
    server.shutdown()
    thread.join()
    server.socket.close()


def names(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Each look-up gets the next of `answers`, or the last one. The list has the names asked
    for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *rest: object, **named: object) -> list[Row]:
        # A socket reads the address that it is given by the same function.
        if host[0].isdigit() or ":" in host:
            return real(host, port, *rest, **named)
        asked.append(host)
        found = answers[min(len(asked), len(answers)) - 1]
        return [
            (
                socket.AF_INET6 if ":" in text else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (text, port),
            )
            for text in found
        ]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    return asked


def limits(port: int, **change: object) -> MediaLimits:
    return MediaLimits(
        **{"max_bytes": 1000, "timeout": 30.0, "allowed_hosts": (f"{NAME}:{port}",), **change}
    )


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is this machine's, and this machine counts as public."""
    monkeypatch.setattr(addresses, "is_public", lambda _: True)
    names(monkeypatch, ["127.0.0.1"])


@pytest.mark.parametrize("path", ["good", "open", "chunked", "once", "to//good"])
def test_good_answers(port: int, local: None, path: str) -> None:
    for host in (NAME, "Images.EXAMPLE.com."):
        assert load_bytes(f"http://{host}:{port}/{path}", limits(port)) == b"picture"
    assert {seen["host"] for seen in Handler.seen} == {f"{NAME}:{port}"}
    assert {seen["accept-encoding"] for seen in Handler.seen} == {"identity"}


@pytest.mark.parametrize(
    ("path", "message"),
    {
        "empty": "it is empty",
        "missing": "answers with status 404",
        "short": "failed",
        "gzip": "compressed body",
        "long": "more than 1000 bytes",
        "endless": "more than 1000 bytes",
        "garbage": "failed",
        "again": "redirects more than 3 times",
        "nowhere": "redirects to nowhere",
        "to/http://evil.example/": "'evil.example' is not allowed",
        "to/http://127.0.0.1/": "'127.0.0.1' is not allowed",
        "to///evil.example/": "'evil.example' is not allowed",
        "to/file:///etc/passwd": "not one of http or https",
        "to/http://me@images.example.com/": "a user's name",
        "to/http://[": "is not allowed",
    }.items(),
)
def test_bad_answers(port: int, local: None, path: str, message: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        load_bytes(f"http://{NAME}:{port}/{path}", limits(port), label="image 2")
    assert time.perf_counter() - start < SOON
    text = str(caught.value)
    assert text.startswith("image 2: ")
    assert message in text
    assert "secret" not in text
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("path", ["drip", "head"])
def test_slow_servers_end_at_the_deadline(port: int, local: None, path: str) -> None:
    start = time.perf_counter()
    with pytest.raises(RequestError, match=r"longer than 0\.3 seconds"):
        load_bytes(f"http://{NAME}:{port}/{path}", limits(port, timeout=0.3))
    assert time.perf_counter() - start < SOON


def test_a_slow_look_up_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(addresses.socket, "getaddrinfo", lambda *_, **__: gate.wait(30) and [])
    start = time.perf_counter()
    with pytest.raises(RequestError, match="took too long"):
        load_bytes(f"http://{NAME}:80/", limits(80, timeout=0.2))
    assert time.perf_counter() - start < SOON
    gate.set()


PRIVATE = [
    "127.0.0.1",
    "127.9.9.9",
    "0.0.0.0",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "169.254.169.254",
    "192.0.2.1",
    "198.18.0.1",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::1",
    "::",
    "fe80::1",
    "fe80::1%2",
    "fec0::1",
    "fc00::1",
    "fd00:ec2::254",
    "ff02::1",
    "2001:db8::1",
    "::ffff:10.0.0.1",
    "::ffff:127.0.0.1",
    "::10.0.0.1",
    "::127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::1",
    "2002:7f00:1::",
    "2002:a00:1::1",
    "2001:0:7f00:1::1",
]


@pytest.mark.parametrize("address", PRIVATE)
@pytest.mark.parametrize("others", [[], [PUBLIC], ["2606:2800:220:1::1"]])
def test_addresses_that_are_not_public(
    monkeypatch: pytest.MonkeyPatch, address: str, others: list[str]
) -> None:
    names(monkeypatch, [*others, address])
    monkeypatch.setattr(
        socket, "create_connection", lambda *_, **__: pytest.fail("a connection was made")
    )
    start = time.perf_counter()
    with pytest.raises(RequestError, match="not public") as caught:
        load_bytes(f"http://{NAME}/", MediaLimits(allowed_hosts=(NAME,)))
    assert time.perf_counter() - start < SOON
    assert address not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    [
        PUBLIC,
        "8.8.8.8",
        "2606:2800:220:1::1",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "2002:808:808::1",
    ],
)
def test_addresses_that_are_public(address: str) -> None:
    assert addresses.is_public(ip_address(address))


def refuse(monkeypatch: pytest.MonkeyPatch, called: list[str]) -> None:
    def connect(address: tuple[str, int], *_: object, **__: object) -> socket.socket:
        called.append(address[0])
        raise ConnectionRefusedError(f"no connection to {address[0]}")

    monkeypatch.setattr(socket, "create_connection", connect)


def test_the_connection_goes_to_the_address_that_was_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    asked = names(monkeypatch, [PUBLIC, "8.8.8.8"], ["127.0.0.1"])
    refuse(monkeypatch, called)
    with pytest.raises(RequestError, match=f"the fetch from '{NAME}' failed") as caught:
        load_bytes(f"http://{NAME}/", MediaLimits(allowed_hosts=(NAME,)))
    assert called == [PUBLIC, "8.8.8.8"]
    assert asked == [NAME]
    assert PUBLIC not in str(caught.value)


def test_a_redirect_to_a_name_that_is_now_private(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
    monkeypatch.setattr(addresses, "is_public", lambda address: not str(address).startswith("10."))
    with pytest.raises(RequestError, match="not public"):
        load_bytes(f"http://{NAME}:{port}/once", limits(port))


def test_proxies_are_not_used(port: int, local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert load_bytes(f"http://{NAME}:{port}/good", limits(port)) == b"picture"


def test_names_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, [])
    with pytest.raises(RequestError, match="has no address"):
        load_bytes(f"http://{NAME}/", MediaLimits(allowed_hosts=(NAME,)))
