"""Unix sockets and TLS: the bounds of connections hold there, too."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme
from starlette.responses import JSONResponse, StreamingResponse
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.lifecycle import KnownClient
from toolkit_lm_server.limits.connections import HttpServer
from toolkit_lm_server.listening import bind, bind_unix, listen, tls_context, url_of
from toolkit_lm_server.options import ServerOptions

pytestmark = pytest.mark.anyio
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope, receive, send):
    """Says who asks; /endless never ends."""
    if scope["path"] == "/endless":

        async def parts():
            while True:
                yield b"x" * 2**16
                await asyncio.sleep(0)

        await StreamingResponse(parts())(scope, receive, send)
        return
    body = {
        "scheme": scope["scheme"],
        "client": None if scope["client"] is None else scope["client"][0],
    }
    await JSONResponse(body)(scope, receive, send)


@asynccontextmanager
async def serving(listener, context=None, **options):
    """A server in this event loop."""
    made = ServerOptions(log_level="critical", access_log=False, **options)
    server = HttpServer(KnownClient(app), made, context)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.bounded.abort()
        server.should_exit = True
        await task


async def until(condition, seconds=10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def end_of(reader: asyncio.StreamReader, seconds=10.0) -> bytes:
    """What comes until the server ends the connection."""
    found = b""
    async with asyncio.timeout(seconds):
        try:
            while part := await reader.read(2**16):
                found = (found + part)[-1000:]
        except (ConnectionError, ssl.SSLError):
            pass
    return found


class Authority:
    """Certificates for a server and its clients, in files."""

    def __init__(self, folder) -> None:
        self.ca = trustme.CA()
        self.file, self.cert, self.key, self.both = (
            str(folder / f"{name}.pem") for name in ("ca", "cert", "key", "both")
        )
        own = self.ca.issue_cert("localhost", "127.0.0.1")
        self.ca.cert_pem.write_to_path(self.file)
        own.private_key_pem.write_to_path(self.key)
        own.cert_chain_pems[0].write_to_path(self.cert)
        own.private_key_and_cert_chain_pem.write_to_path(self.both)

    @property
    def options(self) -> dict[str, str]:
        return {"ssl_certfile": self.cert, "ssl_keyfile": self.key}

    def client(self, named: bool = False) -> ssl.SSLContext:
        """A client's, with a certificate of its own where it is `named`."""
        context = ssl.create_default_context()
        self.ca.configure_trust(context)
        if named:
            self.ca.issue_cert("client@example.com").configure_cert(context)
        return context


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def secured(authority):
    """secured(**options): a context with a server that speaks TLS, and its port."""

    @asynccontextmanager
    async def run(**options):
        made = authority.options | options
        listener = bind("127.0.0.1", 0)
        async with serving(listener, tls_context(ServerOptions(**made)), **made) as server:
            yield server, listener.getsockname()[1]

    return run


# TLS


async def test_tls(secured, authority):
    async with secured() as (_, port):
        async with httpx.AsyncClient(verify=authority.client()) as client:
            for _ in range(2):
                response = await client.get(f"https://localhost:{port}/")
                assert response.json() == {"scheme": "https", "client": "127.0.0.1"}
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient() as client:
                await client.get(f"https://localhost:{port}/")
        with pytest.raises(httpx.RemoteProtocolError):
            async with httpx.AsyncClient() as client:
                await client.get(f"http://localhost:{port}/")


async def test_clients_may_need_a_certificate(secured, authority):
    async with secured(ssl_ca_certs=authority.file) as (_, port):
        async with httpx.AsyncClient(verify=authority.client(named=True)) as client:
            assert (await client.get(f"https://localhost:{port}/")).status_code == 200
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            async with httpx.AsyncClient(verify=authority.client()) as client:
                await client.get(f"https://localhost:{port}/")


async def test_a_handshake_has_its_time(secured):
    """As the headers have: a client that says nothing, and one that begins a handshake."""
    async with secured(header_timeout=1) as (_, port):
        for begun in (b"", b"\x16\x03\x01\x02\x00\x01"):
            start = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(begun)
                await end_of(reader)
                assert 0.5 < time.monotonic() - start < 8
            finally:
                writer.close()


async def test_handshakes_count_as_connections(secured, authority):
    """A new connection takes the place of one whose handshake does not begin."""
    async with secured(max_connections=4) as (_, port):
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        for reader, _ in idle[:2]:
            await end_of(reader)
        async with httpx.AsyncClient(verify=authority.client()) as client:
            assert (await client.get(f"https://localhost:{port}/")).status_code == 200
        await end_of(idle[2][0])
        for _, writer in idle:
            writer.close()


async def test_headers_and_bodies_have_their_time_under_tls(secured, authority):
    async with secured(header_timeout=1, body_timeout=1) as (_, port):
        # The app answers without the body; what has not come of it ends the connection.
        for sent, is_answered in (
            (b"GET / HTTP/1.1\r\n", False),
            (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx", True),
        ):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=authority.client(), server_hostname="localhost"
            )
            writer.write(sent)
            assert (b" 200 " in await end_of(reader)) is is_answered
            writer.close()


async def test_large_headers_are_refused_under_tls(secured, authority):
    async with (
        secured(max_header_size="2KiB") as (_, port),
        httpx.AsyncClient(verify=authority.client()) as client,
    ):
        assert (
            await client.get(f"https://localhost:{port}/", headers={"x": "y" * 4000})
        ).status_code == 431


async def test_a_client_that_does_not_read_is_ended_under_tls(secured, authority):
    async with secured(write_timeout=1) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client = await asyncio.to_thread(
                authority.client().wrap_socket, plain, server_hostname="localhost"
            )
            with client:
                client.sendall(GET.replace(b"GET /", b"GET /endless"))
                await until(
                    lambda: server.server_state.connections and server.bounded.num_unread == 1
                )
                [one] = server.server_state.connections
                assert one.num_unsent >= one.handshake.below.get_write_buffer_size() > 0
                await until(lambda: not server.server_state.connections)


@pytest.mark.parametrize("wrong", ["missing", "no_key", "other_key", "no_pem", "encrypted"])
def test_files_that_cannot_be_used(authority, tmp_path, wrong):
    other = Authority(tmp_path)
    (tmp_path / "text").write_text("no PEM")
    key = f"{tmp_path}/{'text' if wrong == 'no_pem' else 'nothing'}"
    if wrong == "encrypted":
        from cryptography.hazmat.primitives import serialization as forms

        plain = forms.load_pem_private_key(Path(authority.key).read_bytes(), None)
        key = str(tmp_path / "encrypted.pem")
        secret = plain.private_bytes(
            forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.BestAvailableEncryption(b"word")
        )
        Path(key).write_bytes(secret)
    keys = {"other_key": other.key, "no_key": None}
    with pytest.raises(ConfigError, match="ssl_certfile") as error:
        tls_context(ServerOptions(ssl_certfile=authority.cert, ssl_keyfile=keys.get(wrong, key)))
    assert "BEGIN" not in str(error.value)


def test_one_file_may_hold_certificate_and_key(authority):
    assert tls_context(ServerOptions(ssl_certfile=authority.both)) is not None
    assert tls_context(ServerOptions()) is None


def test_authorities_that_are_none(authority):
    with pytest.raises(ConfigError, match="ssl_ca_certs"):
        tls_context(ServerOptions(**authority.options, ssl_ca_certs=authority.key))


@pytest.mark.parametrize(
    "options",
    [{"ssl_keyfile": "k"}, {"ssl_ca_certs": "c"}, {"uds_mode": "rw"}, {"uds_mode": "999"}],
)
def test_options_that_fit_nothing(options):
    with pytest.raises(ConfigError):
        ServerOptions(**options)


# Unix sockets


async def test_a_unix_socket(tmp_path):
    path = str(tmp_path / "socket")
    with listen(ServerOptions(uds=path, uds_mode="660")) as listener:
        assert url_of(listener) == f"unix:{path}"
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        async with (
            serving(listener, uds=path),
            httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=path), base_url="http://localhost"
            ) as client,
        ):
            assert (await client.get("/")).json() == {"scheme": "http", "client": "unix"}
            # A proxy beside it says whom it asks for.
            headers = {"x-forwarded-for": "5.6.7.8, 1.2.3.4", "x-forwarded-proto": "https"}
            assert (await client.get("/", headers=headers)).json() == {
                "scheme": "https",
                "client": "1.2.3.4",
            }
    assert not os.path.exists(path)


async def test_bounds_hold_for_unix_sockets(tmp_path):
    path = str(tmp_path / "socket")
    with listen(ServerOptions(uds=path)) as listener:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        async with serving(
            listener, uds=path, header_timeout=1, write_timeout=1, max_connections=2
        ) as server:
            reader, writer = await asyncio.open_unix_connection(path)
            writer.write(b"GET / HTTP/1.1\r\n")
            assert b" 408 " in await end_of(reader)
            writer.close()
            _, writer = await asyncio.open_unix_connection(path, limit=1)
            writer.write(GET.replace(b"GET /", b"GET /endless"))
            await until(lambda: server.bounded.num_unread == 1)
            await until(lambda: not server.server_state.connections)
            writer.close()


def test_a_stale_socket_is_replaced(tmp_path):
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path)
    assert os.path.exists(path)
    with (
        listen(ServerOptions(uds=path)),
        pytest.raises(ConfigError, match="another server listens"),
    ):
        bind_unix(path, 0o600)
    assert not os.path.exists(path)


def test_nothing_else_is_replaced(tmp_path):
    file = tmp_path / "file"
    link = tmp_path / "link"
    file.write_text("mine")
    link.symlink_to(file)
    for path in (file, link, tmp_path):
        with pytest.raises(ConfigError, match="no socket"):
            bind_unix(str(path), 0o600)
    assert file.read_text() == "mine" and link.is_symlink()
    for path in (tmp_path / "no" / "socket", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="uds"):
            bind_unix(str(path), 0o600)


def test_another_servers_socket_is_left(tmp_path):
    path = str(tmp_path / "socket")
    with listen(ServerOptions(uds=path)):
        os.unlink(path)
        other = bind_unix(path, 0o600)
    assert os.path.exists(path)
    other.close()


def test_a_server_at_a_unix_socket_with_tls(tmp_path, authority):
    path = str(tmp_path / "socket")
    flags = [
        "--uds",
        path,
        "--ssl-certfile",
        authority.cert,
        "--ssl-keyfile",
        authority.key,
        "--ssl-ca-certs",
        authority.file,
    ]
    command = [
        sys.executable,
        "-c",
        "from toolkit_lm_cli import main; main()",
        "render",
        "tiny",
        *flags,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == f"Serving tiny at unix:{path}\n"
            transport = httpx.HTTPTransport(uds=path, verify=authority.client(named=True))
            with httpx.Client(transport=transport, base_url="https://localhost") as client:
                assert client.post("/tokenize", json={"prompt": "a"}).json()["count"] == 1
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, os.path.exists(path)) == (0, False), errors
