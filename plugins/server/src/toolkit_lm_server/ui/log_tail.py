"""The last lines of the server's log."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

_LINES = 200
_MOST_CHARACTERS = 500
_SERVER = "uvicorn.error"
_ACCESS = ("uvicorn.access", "toolkit_lm_server.access")
"""Loggers of requests. Their records are not kept, because a path may hold anything."""


class Line(NamedTuple):
    """A record of the log, without its traceback."""

    number: int
    time: float
    level: str
    text: str


class LogTail(logging.Handler):
    """Keeps the last lines of the toolkit's own loggers, and none of other libraries. A line is
    cut, and has neither control characters nor any of `secrets`."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__(logging.INFO)
        self._secrets = [secret for secret in secrets if secret]
        self._lines: deque[Line] = deque(maxlen=_LINES)
        self._count = 0

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Adds the handler to the root logger, until the end of the `with` block. The process must
        be the server's own."""
        root = logging.getLogger()
        root.addHandler(self)
        try:
            yield
        finally:
            root.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if (
            not (record.name.startswith("toolkit_lm") or record.name == _SERVER)
            or record.name in _ACCESS
        ):
            return
        try:
            text = record.getMessage()
        except Exception:
            self.handleError(record)
            return
        for secret in self._secrets:
            text = text.replace(secret, "***")
        text = "".join(
            character if character.isprintable() else " " for character in text[:_MOST_CHARACTERS]
        )
        self._count += 1
        self._lines.append(Line(self._count, record.created, record.levelname.lower(), text))

    def since(self, number: int) -> list[Line]:
        """The lines after the one with this number."""
        return [line for line in tuple(self._lines) if line.number > number]
