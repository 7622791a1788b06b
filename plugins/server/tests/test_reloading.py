"""Certificates and keys that change while a server runs, and what systemd is told meanwhile."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import pexpect
import pytest
import trustme
from toolkit_lm_server.errors import ApiError
from toolkit_lm_server.keys import Keys
from toolkit_lm_server.limits.key_limits import ApiKey
from toolkit_lm_server.listening import tls_context
from toolkit_lm_server.options import ServerOptions
from toolkit_lm_server.reloading import Reloading
from toolkit_lm_server.supervisor import Supervisor

COMMAND = [sys.executable, "-c", "from toolkit_lm_cli import main; main()", "render", "tiny"]
ALICE = "- {name: alice, key: key-of-alice, requests_per_minute: 2}"


def write_keys(path: Path, *lines: str) -> None:
    # In one step: a server may be reading it.
    new = path.with_suffix(".new")
    new.write_text("\n".join(["keys:", *lines]))
    new.replace(path)


def write_certificate(path: Path) -> trustme.CA:
    """Writes a certificate of a new authority, with its key. Returns the authority."""
    authority = trustme.CA()
    made = authority.issue_cert("localhost", "127.0.0.1")
    new = path.with_suffix(".new")
    made.private_key_and_cert_chain_pem.write_to_path(str(new))
    new.replace(path)
    return authority


@pytest.fixture
def options(tmp_path):
    write_keys(tmp_path / "keys.yaml", ALICE)
    write_certificate(tmp_path / "server.pem")
    return ServerOptions(
        api_keys_file=str(tmp_path / "keys.yaml"), ssl_certfile=str(tmp_path / "server.pem")
    )


@pytest.fixture
def served(options):
    """A server's keys and connections, and what reloads them whenever it is tended."""
    connections = SimpleNamespace(context=tls_context(options))
    keys = Keys.of(options)
    return keys, connections, Reloading(options, keys, connections, Supervisor(), seconds=0.0)


@pytest.mark.anyio
async def test_what_has_changed_is_read(served, options, caplog):
    keys, connections, reloading = served
    before = connections.context
    caplog.set_level("INFO")
    await reloading.tend("")
    assert (connections.context, caplog.records) == (before, [])
    write_keys(Path(options.api_keys_file), "- {name: bob, key: key-of-bob}")
    await reloading.tend("")
    assert keys.find("Bearer key-of-bob").name == "bob"
    with pytest.raises(ApiError):
        keys.find("Bearer key-of-alice")
    assert list(keys.accounts) == ["bob"] and not keys.limited
    write_certificate(Path(options.ssl_certfile))
    await reloading.tend("")
    assert connections.context not in (None, before)
    [first, second] = [record.message for record in caplog.records]
    assert first == second == "Reloaded the certificate and 1 API keys (a file has changed)"


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["missing", "no YAML", "twice", "certificate"])
async def test_a_fault_changes_nothing(served, options, fault, caplog):
    """The files may be written one after the other: the next change is read again."""
    keys, connections, reloading = served
    before = connections.context
    path = Path(options.api_keys_file)
    if fault == "certificate":
        Path(options.ssl_certfile).write_text("no PEM")
    elif fault == "missing":
        path.unlink()
    else:
        write_keys(path, *(["- {: secret"] if fault == "no YAML" else [ALICE, ALICE]))
    await reloading.tend("")
    assert keys.find("Bearer key-of-alice").name == "alice" and list(keys.accounts) == ["alice"]
    assert "what was read before stays" in caplog.text and "secret" not in caplog.text
    if fault == "certificate":
        assert connections.context is before
    write_certificate(Path(options.ssl_certfile))
    write_keys(path, ALICE, "- {name: bob, key: key-of-bob}")
    await reloading.tend("")
    assert keys.find("Bearer key-of-bob").name == "bob" and connections.context is not before


def test_a_key_keeps_what_it_has_used():
    """Another limit begins a new minute; another key of the same name does not."""
    keys = Keys([ApiKey(name="alice", key="old", requests_per_minute=1)], clock=lambda: 0.0)
    account = keys.accounts["alice"]
    account.begin()
    with account.run(3, 0):
        keys.replace([ApiKey(name="alice", key="new", requests_per_minute=1)])
        assert keys.find("Bearer new") is account
        with pytest.raises(ApiError, match="requests_per_minute is 1"):
            account.begin()
        limits = {"requests_per_minute": 2, "max_sequences": 4}
        keys.replace([ApiKey(name="alice", key="new", **limits)])
        account.begin()
        with pytest.raises(ApiError, match="max_sequences is 4"), account.run(2, 0):
            pass
    with pytest.raises(ApiError):
        keys.find("Bearer old")


def ask(url: str, authority: trustme.CA, key: str) -> int:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.get(f"{url}/v1/models", headers=headers, verify=context).status_code


def test_a_server_of_systemd(tmp_path):
    """READY, a reload by SIGHUP, signs of life, and STOPPING."""
    keys = tmp_path / "keys.yaml"
    certificate = tmp_path / "server.pem"
    write_keys(keys, ALICE)
    old = write_certificate(certificate)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        flags = ["--port", "0", "--api-keys-file", keys, "--ssl-certfile", certificate]
        environ = os.environ | {
            "NOTIFY_SOCKET": str(tmp_path / "notify"),
            "WATCHDOG_USEC": "900000",
        }
        with subprocess.Popen(
            [*COMMAND, *map(str, flags)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
        ) as process:

            def told() -> str:
                """The next message, signs of life left out."""
                while (message := listener.recv(4096).decode()) == "WATCHDOG=1":
                    pass
                return message

            try:
                url = process.stdout.readline().split()[-1]
                assert told() == f"READY=1\nSTATUS=Serving tiny at {url}"
                assert (ask(url, old, "key-of-alice"), ask(url, old, "key-of-bob")) == (200, 401)
                write_keys(keys, "- {name: bob, key: key-of-bob}")
                new = write_certificate(certificate)
                process.send_signal(signal.SIGHUP)
                assert told().startswith("RELOADING=1\nMONOTONIC_USEC=")
                assert told() == f"READY=1\nSTATUS=Serving tiny at {url}"
                assert (ask(url, new, "key-of-alice"), ask(url, new, "key-of-bob")) == (401, 200)
                assert listener.recv(4096) == b"WATCHDOG=1"
                process.send_signal(signal.SIGTERM)
                assert told() == "STOPPING=1\nSTATUS=0 requests are under way"
                _, errors = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 0, errors
    assert "Reloaded the certificate and 1 API keys (SIGHUP)" in errors
    assert (
        "Stopping: 0 requests are under way; new ones are refused in 0 s, all end in 10 s" in errors
    )
    assert "0 requests were cut off" in errors


def test_the_end_of_its_terminal_ends_a_server():
    """As it always did; SIGHUP is for reloading where the terminal is still there."""
    child = pexpect.spawn(COMMAND[0], [*COMMAND[1:], "--port", "0"], timeout=60, encoding="utf-8")
    child.expect("Serving tiny at")
    child.kill(signal.SIGHUP)
    child.expect("Reloaded nothing")
    os.close(child.fileno())
    child.child_fd = -1
    child.ptyproc.delayafterterminate = 30
    assert os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1]) == 0
