"""Fetches over https: the address is the one that was checked, and the certificate must be the
name's."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from toolkit_lm.errors import RequestError
from toolkit_lm_media import addresses, fetch
from toolkit_lm_media.limits import MediaLimits
from toolkit_lm_media.source import load_bytes

NAME = "images.example.com"
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nConnection: close\r\n\r\npicture"

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="the certificate is made by openssl"
)


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One file with a key and a certificate for NAME."""
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += [
        "-subj",
        f"/CN={NAME}",
        "-addext",
        f"subjectAltName=DNS:{NAME}",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
    ]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    both = tmp_path / "both.pem"
    both.write_bytes((tmp_path / "key.pem").read_bytes() + (tmp_path / "cert.pem").read_bytes())
    return both


@pytest.fixture
def server(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, list[str | None]]]:
    """The port of a server for one connection, and the names that clients asked it for."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    asked: list[str | None] = []
    context.sni_callback = lambda _, name, __: asked.append(name)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, args=(listener, context))
    thread.start()
    trusting = ssl.create_default_context(cafile=str(certificate))
    monkeypatch.setattr(fetch, "_ssl_context", lambda: trusting)
    monkeypatch.setattr(addresses, "resolve", lambda *_: ["127.0.0.1"])
    yield listener.getsockname()[1], asked
    thread.join()
    listener.close()


def serve(listener: socket.socket, context: ssl.SSLContext) -> None:
    connection, _ = listener.accept()
    # The client hangs up on a certificate of another name.
    with (
        connection,
        contextlib.suppress(OSError),
        context.wrap_socket(connection, server_side=True) as stream,
    ):
        stream.recv(10_000)
        stream.sendall(ANSWER)


def test_the_certificate_of_the_name(server: tuple[int, list[str | None]]) -> None:
    port, asked = server
    assert (
        load_bytes(f"https://{NAME}:{port}/", MediaLimits(allowed_hosts=(f"{NAME}:{port}",)))
        == b"picture"
    )
    assert asked == [NAME]


def test_the_certificate_of_another_name(server: tuple[int, list[str | None]]) -> None:
    port, asked = server
    with pytest.raises(RequestError, match=r"the fetch from 'other\.example' failed"):
        load_bytes(
            f"https://other.example:{port}/", MediaLimits(allowed_hosts=(f"other.example:{port}",))
        )
    assert asked == ["other.example"]
