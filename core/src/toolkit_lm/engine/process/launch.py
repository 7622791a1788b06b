"""The engine process as its front sees it: start, detection of its end, and termination."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from toolkit_lm.engine.process.stderr import StderrRelay, last_words
from toolkit_lm.errors import ConfigError, EngineDeadError

_MOST_BYTES = 107 if sys.platform == "linux" else 103
"""Most bytes of a unix socket's path."""
_GRACE = 0.5
"""Seconds that an engine process gets to end by itself, once its lifeline is cut."""
_ENVIRON = {
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    "LRU_CACHE_CAPACITY": "256",
    "GOMP_SPINCOUNT": "4000",
    "SPT_NOENV": "1",
}
"""Variables of the engine process. The first two: number of kernels that oneDNN and torch keep, of
a megabyte each. Every number of tokens needs several; the default is 1,024. GOMP_SPINCOUNT: how
long OpenMP's threads wait for each other without sleeping. By default that is milliseconds, in
which they keep the cores from the front and from each other. The last one keeps a process title
from overwriting the environment, which others read."""


class EngineProcess:
    """A process that runs main.py. It starts to import at once, and waits for its config.

    Front and engine hold one end each of a socket pair, the lifeline: if either process dies, the
    other's end reads end-of-file. They meet in a folder that is made before the process starts and
    that only their user may enter. The engine process deletes it once both are connected. Until
    then, the survivor of the two does.
    """

    def __init__(self, environ: Mapping[str, str] = {}) -> None:
        """Starts the process, with `environ` added to its environment.

        Raises ConfigError if the temporary folder's name is too long for a socket's, and
        EngineDeadError if the start fails.
        """
        self._front = os.getpid()
        try:
            self.folder = Path(tempfile.mkdtemp(prefix="toolkit_lm-"))
        except OSError as error:
            raise EngineDeadError(
                f"the folder of the engine's socket cannot be made: {error}. Set TMPDIR to another."
            ) from error
        self._owns_folder = True
        self.address = f"ipc://{self.folder / 'engine'}"
        self.lifeline, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = self._start(theirs.fileno(), environ)
            except BaseException:
                self.lifeline.close()
                shutil.rmtree(self.folder, ignore_errors=True)
                raise
        assert self._process.stderr is not None, "it was asked for"
        self._stderr = StderrRelay(self._process.stderr)

    def _start(self, lifeline: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        if len(os.fsencode(self.folder / "engine")) > _MOST_BYTES:
            raise ConfigError(
                f"the path of the temporary folder {str(self.folder.parent)!r} is too long: a "
                "socket in it may have at most "
                f"{_MOST_BYTES} bytes. Set TMPDIR to a shorter one, or engine_process to False."
            )
        # multiprocessing does the same: the child imports the same modules as this process, and its
        # environment is the same.
        code = (
            f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from "
            "toolkit_lm.engine.process.main import main; main()"
        )
        command = [sys.executable, "-c", code, str(self.folder), str(lifeline), str(self._front)]
        try:
            # Without a shell, and without any text of a client.
            environ = {**_ENVIRON, **os.environ, **environ}
            return subprocess.Popen(  # nosec B603
                command,
                bufsize=0,
                pass_fds=[lifeline],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=environ,
            )
        except OSError as error:
            raise EngineDeadError(
                f"no engine process can be started from {sys.executable!r}: {error}"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def disown_folder(self) -> None:
        """Records that the process has deleted the folder: its name may now belong to another
        process."""
        self._owns_folder = False

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal. A process that has ended is accepted. May be called from any thread."""
        self._process.send_signal(number)

    def end(self) -> None:
        """Ends the process if it has not ended, and deletes its files. Safe to call twice. A fork
        of the front leaves it alone."""
        self.lifeline.close()
        if os.getpid() != self._front:
            return
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.join()
        if self._owns_folder:
            self._owns_folder = False
            shutil.rmtree(self.folder, ignore_errors=True)

    def death(self, phase: str | None) -> EngineDeadError:
        """Ends the process. Returns an error with the way it died and its last output. `phase`:
        what it was doing before it was ready."""
        self.end()
        code = self._process.returncode
        stderr = self._stderr.text
        how = (
            f"ended with exit code {code}"
            if code >= 0
            else f"was killed by {signal.Signals(-code).name}"
        )
        while_phase = "" if phase is None else f" while {phase}"
        message = f"the engine process {self.pid} has died{while_phase}: it {how}"
        if -code == signal.SIGKILL:
            # Its earlier output does not explain the end.
            message += "; perhaps the machine ran out of memory"
        words = "" if -code == signal.SIGKILL else last_words(stderr)
        error = EngineDeadError(
            f"{message}. The last that it wrote to stderr: {words}" if words else f"{message}."
        )
        if stderr:
            error.add_note(f"The end of the engine process's stderr:\n{stderr}")
        return error
