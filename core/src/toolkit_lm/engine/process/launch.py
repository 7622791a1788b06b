"""The engine process as its front sees it: how it is started, how its end is noticed, and how it is ended."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from toolkit_lm.errors import ConfigError, EngineDeadError

_MOST_BYTES = 107 if sys.platform == "linux" else 103
"""Of the path of a unix socket."""
_GRACE = 0.5
"""Seconds that an engine process gets to end by itself, once its lifeline is cut."""


class EngineProcess:
    """A process that runs process_main.py. It starts to import at once, and waits for its config.

    Front and engine hold one end each of a socket pair, the lifeline: whichever process dies, the other's end reads end-of-file. The
    engine process makes the socket folder, under a name that is agreed before, so that whoever survives can delete it.
    """

    def __init__(self) -> None:
        """Starts it. Raises ConfigError where the temporary folder's name is too long for a socket's, EngineDeadError where that fails."""
        self.folder = Path(tempfile.gettempdir()) / f"toolkit_lm-{secrets.token_hex(8)}"
        self.address = f"ipc://{self.folder / 'engine'}"
        if len(os.fsencode(self.folder / "engine")) > _MOST_BYTES:
            raise ConfigError(
                f"the temporary folder {str(self.folder.parent)!r} has too long a name for a socket in it, which may have "
                f"{_MOST_BYTES} bytes: set TMPDIR to another, or engine_process to False."
            )
        self.lifeline, theirs = socket.socketpair()
        with theirs:
            arguments = [str(self.folder), str(theirs.fileno()), str(os.getpid())]
            # As multiprocessing does, so that it imports what this process would import, and its environment is the same.
            code = f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from toolkit_lm.engine.process.main import main; main()"
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code, *arguments], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
                )
            except OSError as error:
                self.lifeline.close()
                raise EngineDeadError(f"no engine process can be started from {sys.executable!r}: {error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: signal.Signals) -> None:
        """No error when it has ended. From any thread."""
        self._process.send_signal(number)

    def end(self) -> str:
        """Ends it if it has not ended, and deletes what it leaves. Returns how it ended, for a message. Safe to call twice."""
        self.lifeline.close()
        try:
            code = self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
        if code >= 0:
            return f"it ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = "; perhaps the machine ran out of memory" if -code == signal.SIGKILL else ""
        return f"it was killed by {name}{hint}"
