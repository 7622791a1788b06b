"""What systemd is told, by a socket in its place."""

from __future__ import annotations

import os
import socket
import time

import pytest
from toolkit_lm_server.supervisor import Supervisor


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(10)
        yield made


def received(listener: socket.socket) -> dict[str, str]:
    lines = listener.recv(4096).decode().split("\n")
    return dict(line.split("=", 1) for line in lines)


def test_each_message(listener):
    environ = {"NOTIFY_SOCKET": listener.getsockname(), "PATH": "/bin"}
    supervisor = Supervisor.of_environ(environ)
    assert environ == {"PATH": "/bin"}
    supervisor.ready("Serving\ntiny")
    assert received(listener) == {"READY": "1", "STATUS": "Serving tiny"}
    before = time.monotonic_ns() // 1000
    supervisor.reloading()
    message = received(listener)
    assert message["RELOADING"] == "1"
    assert before <= int(message["MONOTONIC_USEC"]) <= time.monotonic_ns() // 1000
    supervisor.stopping("2 requests under way")
    assert received(listener) == {"STOPPING": "1", "STATUS": "2 requests under way"}


def test_an_abstract_socket():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"toolkit-lm-{os.getpid()}-notify"
        listener.bind(f"\0{name}")
        listener.settimeout(10)
        Supervisor.of_environ({"NOTIFY_SOCKET": f"@{name}"}).ready("")
        assert received(listener) == {"READY": "1", "STATUS": ""}


def test_the_watchdog_is_fed_three_times_a_period(listener):
    watchdog = {"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid())}
    supervisor = Supervisor.of_environ({"NOTIFY_SOCKET": listener.getsockname(), **watchdog})
    supervisor.alive()
    supervisor.alive()
    assert received(listener) == {"WATCHDOG": "1"}
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(1)
    supervisor._last -= 20.1
    supervisor.alive()
    assert received(listener) == {"WATCHDOG": "1"}


@pytest.mark.parametrize(
    "watchdog", [{}, {"WATCHDOG_USEC": "soon"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}]
)
def test_a_watchdog_of_nobody_or_another_process_is_not_fed(listener, watchdog):
    supervisor = Supervisor.of_environ({"NOTIFY_SOCKET": listener.getsockname(), **watchdog})
    supervisor.alive()
    listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        listener.recv(1)


@pytest.mark.parametrize("address", [None, "", "vsock:2:9999", "/nonexistent/notify"])
def test_nobody_listens(address, caplog):
    environ = {} if address is None else {"NOTIFY_SOCKET": address}
    supervisor = Supervisor.of_environ(environ)
    supervisor.ready("")
    supervisor.ready("")
    assert len(caplog.records) == (1 if address else 0)
