"""Attacks on `toolkit route`: what the router passes on is refused as the server itself refuses it,
and its own routes refuse what they cannot take. It never dies of a request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from attacks import ATTACKS, BODIES
from continued import SERVE, Command
from toolkit_lm_router.proxy import PATHS

ROUTED = sorted(PATHS & BODIES.keys())
MOST_SECONDS = 10
OWN = {
    "/router/backends/add": {"url": "http://127.0.0.1:9"},
    "/router/backends/drain": {"url": "http://127.0.0.1:9"},
    "/router/backends/remove": {"url": "http://127.0.0.1:9"},
}
KEY = {"authorization": "Bearer ops"}
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
RAW = {
    "two lengths": HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n" + BODY,
    "a length and chunks": HEAD
    + b"Content-Length: 32\r\nTransfer-Encoding: chunked\r\n\r\n20\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": HEAD.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n20\r\n"
    + BODY
    + b"\r\n0\r\n\r\n",
    "an unknown encoding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n" + BODY,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY,
    "a huge length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n" + BODY,
    "no host": HEAD.replace(b"Host: 127.0.0.1\r\n", b"") + b"Content-Length: 32\r\n\r\n" + BODY,
    "another host": HEAD.replace(b"127.0.0.1", b"evil.example") + b"Content-Length: 0\r\n\r\n",
    "long headers": HEAD + b"X: " + b"x" * 2**17 + b"\r\n\r\n",
    "many headers": HEAD + b"X: x\r\n" * 200 + b"\r\n",
    "a bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "nothing of HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 40 + b"\r\n\r\n",
}


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[str, str]]:
    """A server, and a router in front of it."""
    server = Command(*SERVE, "--max-body-size", "2MiB")
    commands = [server]
    try:
        url = server.url()
        words = ("--admin-key", "ops", "--port", "0", "--max-body-size", "2MiB")
        router = Command("route", "--backend", url, *words)
        commands.append(router)
        yield url, router.url()
    finally:
        for command in commands:
            command.kill()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=MOST_SECONDS) as made:
        yield made


def test_each_routed_path_with_a_body_is_attacked():
    assert {*ROUTED} == PATHS - {"/v1/audio/transcriptions", "/v1/audio/translations"}


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in (1, 2))]
)
@pytest.mark.parametrize("path", ROUTED)
def test_the_answer_is_the_servers_own(urls, client, path, part):
    """A third of the pairs of a path and an attack runs by day: each path, and each attack."""
    server, router = urls
    first = ROUTED.index(path) + part
    for name in list(ATTACKS)[first % 3 :: 3]:
        content = ATTACKS[name](path)
        alone = client.post(server + path, content=content, headers=JSON)
        routed = client.post(router + path, content=content, headers=JSON)
        where = f"{name}: {routed.status_code} {routed.text[:200]}"
        if alone.status_code == 200:
            assert routed.status_code == 200, where
        elif "model" in name:
            # The router knows the models, and has words of its own.
            assert routed.status_code == 404, where
            assert alone.status_code in (400, 404), where
        else:
            assert (routed.status_code, routed.content) == (alone.status_code, alone.content), where


@pytest.mark.parametrize("name", RAW)
def test_framing_is_the_servers(urls, name):
    def status(url: str) -> bytes:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port), MOST_SECONDS) as connection:
            connection.settimeout(MOST_SECONDS)
            connection.sendall(RAW[name])
            found = b""
            while b"\r\n" not in found and (part := connection.recv(4096)):
                found += part
        return found.split(b"\r\n")[0]

    server, router = urls
    assert status(router) == status(server) != b""
    assert b" 2" not in status(router)[:14]


@pytest.mark.parametrize("path", OWN)
def test_its_own_routes_refuse_attacks(urls, client, path, monkeypatch):
    _, router = urls
    monkeypatch.setitem(BODIES, path, OWN[path])
    for name, attack in ATTACKS.items():
        content = attack(path)
        assert client.post(router + path, content=content, headers=JSON).status_code == 401
        answer = client.post(router + path, content=content, headers={**JSON, **KEY})
        where = f"{name}: {answer.status_code} {answer.text[:200]}"
        assert answer.status_code < 500, where
        if answer.status_code >= 400:
            assert {*answer.json()["error"]} == {"message", "type", "param", "code"}, where
            assert len(answer.content) < 3000, where
    assert client.get(f"{router}/live").status_code == 200
