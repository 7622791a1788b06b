"""Processes of `toolkit render`, to be asked and to be killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys


class Renderers:
    """Processes of `toolkit render`."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, *arguments: str) -> str:
        command = [
            sys.executable,
            "-c",
            "from toolkit_lm_cli import main; main()",
            "render",
            *arguments,
            "--port",
            "0",
        ]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, f"the renderer ended with exit code {process.wait()}"
        self.processes[found[0]] = process
        return found[0]

    def kill(self, url: str) -> None:
        os.kill(self.processes[url].pid, signal.SIGKILL)
        self.processes[url].wait()

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
