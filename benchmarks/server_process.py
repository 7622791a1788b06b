"""`toolkit serve` in processes of its own: start, memory, figures, stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
from http_client import fetch

START_SECONDS = 300
STOP_SECONDS = 30


class ServerProcess:
    """A server on a free port, whose temporary files are all in `folder`; what it writes to stderr
    is in the file `log`."""

    def __init__(
        self, folder: Path, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.log = folder / "server.log"
        command = [
            sys.executable,
            "-c",
            "from toolkit_lm_cli import main; main()",
            "serve",
            *arguments,
            "--port",
            "0",
            "--no-access-log",
        ]
        # XDG_RUNTIME_DIR would be preferred for sockets by those who know it.
        inherited = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**inherited, "TMPDIR": str(self.temporary), **(environ or {})},
            )
        self.seen: dict[int, psutil.Process] = {}
        """Every process that was ever seen of it, by id."""
        try:
            self.port = self._wait_for_port()
        except BaseException:
            self.process.kill()
            raise

    def _wait_for_port(self) -> int:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("Serving "):
            raise RuntimeError(f"the server did not start: {line}{self.log.read_text()[-4000:]}")
        return int(line.rsplit(":", 1)[1])

    async def wait_ready(self) -> None:
        """Until /ready says so."""
        end = time.monotonic() + START_SECONDS
        while (await fetch(self.port, "GET", "/ready")).status != 200:
            if time.monotonic() > end:
                raise TimeoutError(f"the server was not ready after {START_SECONDS} s")
            await asyncio.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.process.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
        self.seen |= {one.pid: one for one in found}
        return found

    def resident_bytes(self) -> int:
        """Resident memory of all its processes; pages that they share count in each."""
        total = 0
        for one in self.processes():
            try:
                total += one.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total

    async def figures(self) -> dict[str, float]:
        """/metrics, by name, with the labels but for the model's."""
        text = re.sub(
            r'\{model_name="[^"]*"\}|(?<=\{)model_name="[^"]*",',
            "",
            (await fetch(self.port, "GET", "/metrics")).body.decode(),
        )
        rows = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name.removeprefix("toolkit_lm_"): float(value) for name, value in rows}

    def stop(self) -> int:
        """Sends SIGTERM, and returns the exit code."""
        self.processes()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            for one in self.processes():
                one.kill()
            raise

    def left_behind(self) -> list[str]:
        """Processes that are still alive, and temporary files that are still there."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=5)
        return [f"process {one.pid} ({one.name()})" for one in alive] + sorted(
            str(path.name) for path in self.temporary.iterdir()
        )
