"""The process's standard streams. The program that started the server may have closed them, or may
not read them."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MOST_LINES = 10_000
"""Most lines of the log that wait to be written. Later ones are lost."""
_AT_END = 1.0
"""Seconds in which waiting lines are written at the end."""


def open_closed_streams() -> None:
    """Opens /dev/null in place of closed streams. Otherwise a socket would get their number, and
    printed text would go into it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def logging_in_threads(*names: str) -> Iterator[None]:
    """Has the handlers of these loggers write in threads, so that a full pipe blocks no other
    work."""
    handlers = [
        handler
        for name in names
        for handler in logging.getLogger(name).handlers
        if isinstance(handler, logging.StreamHandler)
    ]
    writers = [_Writer(handler.stream.fileno()) for handler in handlers]
    for handler, writer in zip(handlers, writers, strict=True):
        handler.setStream(writer)
    try:
        yield
    finally:
        deadline = time.monotonic() + _AT_END
        for writer in writers:
            writer.wait(deadline)


class _Writer:
    """A stream whose text a thread writes to a file descriptor.

    A finalizer may log while its own thread is in `write`. So no lock is held there that is not
    reentrant.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="toolkit_lm-log", daemon=True).start()

    def write(self, text: str) -> None:
        if self._lines.qsize() < _MOST_LINES:
            self._lines.put(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Has no effect: nothing is buffered."""

    def wait(self, deadline: float) -> None:
        """Waits until all is written, or the deadline is over."""
        end = threading.Event()
        self._lines.put(end)
        end.wait(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            with suppress(OSError):
                while line:
                    line = line[os.write(self._number, line) :]
