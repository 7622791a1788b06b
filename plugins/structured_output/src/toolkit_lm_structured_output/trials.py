"""The processes that compile grammars before anybody else does."""

from __future__ import annotations

import select
import signal
import subprocess  # nosec B404 # of our own module
import sys
from collections import OrderedDict
from hashlib import sha256
from threading import BoundedSemaphore, Lock
from weakref import finalize

import msgspec

from toolkit_lm_structured_output.contract import Source
from toolkit_lm_structured_output.trial import SECONDS, Job

_PROCESSES = 2
"""At a time: what one grammar takes, others need not wait for."""
_PATIENCE = 60.0
"""Seconds until a process that does not answer is given up."""
_REMEMBERED = 512
_TOO_MUCH = f"it is too complex: it takes more than {SECONDS:g} s to compile and try"
_BROKEN = "it is too complex: it is nested too deeply, or takes too much memory"


class Trials:
    """Tries grammars, several at a time, and remembers what it found. The processes start with the
    first grammar."""

    def __init__(self, source: Source, compiler: str) -> None:
        """`compiler`: as WishReader has it."""
        self._command = [
            sys.executable,
            "-m",
            "toolkit_lm_structured_output.trial",
            compiler,
            msgspec.json.encode(source).decode(),
        ]
        self._slots = BoundedSemaphore(_PROCESSES)
        self._lock = Lock()
        self._idle: list[_Process] = []
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def error_of(self, job: Job) -> str:
        """Why a grammar cannot be used; "" where it can."""
        line = msgspec.json.encode(job)
        digest = sha256(line).digest()
        with self._lock:
            if digest in self._known:
                self._known.move_to_end(digest)
                return self._known[digest]
        with self._slots:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or _Process(self._command)
            error = process.ask(line)
            with self._lock:
                if process.is_alive:
                    self._idle.append(process)
                self._known[digest] = error
                while len(self._known) > _REMEMBERED:
                    self._known.popitem(last=False)
        return error


class _Process:
    def __init__(self, command: list[str]) -> None:
        # A session of its own: what interrupts the engine from the terminal is the engine's.
        self._popen = subprocess.Popen(  # nosec B603 # our own words
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._close = finalize(self, _end, self._popen)
        self.is_alive = True
        if self._read() is None:
            self._close()
            raise RuntimeError(
                f"the process that tries grammars did not start: exit code {self._popen.returncode}"
            )

    def ask(self, line: bytes) -> str:
        assert self._popen.stdin is not None
        try:
            self._popen.stdin.write(line + b"\n")
            self._popen.stdin.flush()
            answer = self._read()
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return msgspec.json.decode(answer, type=str)
        self.is_alive = False
        took_long = self._popen.poll() is None
        self._close()
        return _TOO_MUCH if took_long or self._popen.returncode == -signal.SIGPROF else _BROKEN

    def _read(self) -> bytes | None:
        """The next line. None: the process is dead, or does not answer."""
        assert self._popen.stdout is not None
        if not select.select([self._popen.stdout], [], [], _PATIENCE)[0]:
            return None
        line = self._popen.stdout.readline()
        if not line:
            # Its end is near: the exit code says why.
            try:
                self._popen.wait(5)
            except subprocess.TimeoutExpired:
                return None
        return line or None


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.communicate()
