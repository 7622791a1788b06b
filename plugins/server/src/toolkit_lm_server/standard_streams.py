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
    """A stream whose text a thread writes to a file descriptor."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._lines: queue.Queue[bytes] = queue.Queue(_MOST_LINES)
        threading.Thread(target=self._run, name="toolkit_lm-log", daemon=True).start()

    def write(self, text: str) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(text.encode(errors="backslashreplace"))

    def flush(self) -> None:
        """Has no effect: nothing is buffered."""

    def wait(self, deadline: float) -> None:
        """Waits until all is written, or the deadline is over."""
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            with suppress(OSError):
                while line:
                    line = line[os.write(self._number, line) :]
            self._lines.task_done()
