"""Relay of the engine process's standard error. It keeps the last part, which may explain why the
process died."""

from __future__ import annotations

import os
import re
import sys
import threading
from contextlib import suppress
from typing import IO

_STDERR = 2
_MOST_BYTES = 8192
"""Most bytes of standard error that are kept."""
_MOST_CHARACTERS = 500
"""Most characters of the last words."""
_LATE = 1.0
"""Seconds to wait for the rest after the process has ended. Processes that it started may hold its
stderr open."""
_PYTHON_ERROR = re.compile(
    r"Traceback \(most recent call last\):\n(?:[ \t][^\n]*\n|\n)*(\S.*)", re.DOTALL
)
"""Pattern of the error below a traceback, and of the text after it."""


class StderrRelay:
    """A thread that copies a pipe to this process's standard error. It continues if that no longer
    accepts anything."""

    def __init__(self, source: IO[bytes]) -> None:
        """Owns `source`, which is unbuffered."""
        self._source = source
        self._end = b""
        self._thread = threading.Thread(target=self._run, name="toolkit_lm-stderr", daemon=True)
        self._thread.start()

    @property
    def text(self) -> str:
        """The last part of the text received."""
        return self._end.decode(errors="replace").strip()

    def join(self) -> None:
        """Waits for the rest, after the process's end."""
        self._thread.join(_LATE)

    def _run(self) -> None:
        with self._source as source:
            while data := source.read(2**16):
                self._end = (self._end + data)[-_MOST_BYTES:]
                # A closed terminal must not stop the engine process.
                with suppress(OSError):
                    # If there was no stderr at the start, the descriptor may be any file's.
                    while data and sys.__stderr__ is not None:
                        data = data[os.write(_STDERR, data) :]


def last_words(text: str) -> str:
    """Most telling last words of a stderr: the last Python error, or the interpreter's fatal error,
    or the last line; cut to 500 characters."""
    lines = text.splitlines() or [""]
    fatal = [line for line in lines if line.startswith("Fatal Python error:")]
    _, mark, rest = text.rpartition("Traceback (most recent call last):\n")
    error = _PYTHON_ERROR.match(mark + rest)
    words = error[1] if error else lines[-1]
    if fatal:
        words = fatal[-1]
    return words if len(words) <= _MOST_CHARACTERS else f"{words[:_MOST_CHARACTERS]}..."
