"""A worker process as the engine sees it: its start, its end, and how its death is noticed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from toolkit_lm.engine import StderrRelay, last_words
from toolkit_lm.errors import EngineDeadError

_GRACE = 0.5
"""Seconds that a worker gets to exit by itself once its lifeline is closed."""


class WorkerProcess:
    """A process that runs worker.py. It starts to import at once, and waits for its config.

    Engine and worker hold one end each of a socket pair, the lifeline: whichever process dies, the
    other's end reads end-of-file. The worker reads the key of the launch from it, which stands
    neither in its arguments nor in its environment.
    """

    def __init__(
        self, rank: int, num_threads: int, folder: Path, key: bytes, master: str = ""
    ) -> None:
        """Starts the process. Raises EngineDeadError if that fails.

        `master`: the address of the engine's machine if ranks are on several machines, else "".
        """
        self.rank = rank
        self._parent = os.getpid()
        self.lifeline, theirs = socket.socketpair()
        # multiprocessing sets sys.path like this, so that the child imports the same modules as
        # this process.
        code = (
            f"import sys; sys.path[:] = {list(map(str, sys.path))!r}; from "
            "toolkit_lm_executor_mp.worker import main; main()"
        )
        with theirs:
            command = [
                sys.executable,
                "-c",
                code,
                str(rank),
                str(folder),
                str(theirs.fileno()),
                str(self._parent),
                master,
            ]
            try:
                # Without a shell, and without a word of a client's.
                self._process = subprocess.Popen(  # nosec B603
                    command,
                    bufsize=0,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
                )
            except OSError as error:
                self.lifeline.close()
                raise EngineDeadError(
                    f"no worker can be started from {sys.executable!r}: {error}"
                ) from error
        assert self._process.stderr is not None, "it was asked for"
        self._stderr = StderrRelay(self._process.stderr)
        self.lifeline.sendall(key)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def exit_code(self) -> int:
        """Exit code of the ended process, or the negative number of the signal that killed it."""
        code: int = self._process.returncode
        return code

    def dump_stacks(self) -> None:
        """Has the process write the stacks of its threads to stderr. Does nothing if it has
        ended."""
        self._process.send_signal(signal.SIGUSR1)

    def kill(self) -> None:
        """Kills the process at once. Does nothing if it has ended."""
        self.lifeline.close()
        if os.getpid() == self._parent:
            self._process.kill()

    def end(self) -> None:
        """Ends the process if it has not ended. Safe to call twice. A fork of the engine leaves it
        alone."""
        self.lifeline.close()
        if os.getpid() != self._parent:
            return
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.join()

    def death(self, doing: str) -> EngineDeadError:
        """Ends the process, and returns an error that says how it died.

        The error has the end of its stderr. `doing`: a phrase for it, such as "in step 7".
        """
        self.end()
        code = self.exit_code
        stderr = self._stderr.text
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {_name(-code)}"
        message = f"the worker of rank {self.rank} (process {self.pid}) has died {doing}: it {how}"
        words = "" if -code == signal.SIGKILL else last_words(stderr)
        if -code == signal.SIGKILL:
            # Its earlier output does not explain a SIGKILL.
            message += "; perhaps the machine ran out of memory"
        error = EngineDeadError(
            f"{message}. The last that it wrote to stderr: {words}" if words else f"{message}."
        )
        error.add_note(
            f"The end of its stderr:\n{stderr}" if stderr else "It wrote nothing to stderr."
        )
        return error


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        # Only two real-time signals have names.
        return f"signal {number}"
