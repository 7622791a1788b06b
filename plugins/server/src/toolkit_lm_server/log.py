"""The server's log: the form of its lines, and their destinations."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from toolkit_lm_server.options import ServerOptions

ACCESS = "toolkit_lm_server.access"
"""The logger of requests. Its lines go to stdout, all others to stderr."""
_OWN = ("uvicorn", "toolkit_lm_server")
"""The loggers that follow the option log_level. Other libraries log warnings and worse only."""


def fields(**values: Any) -> dict[str, Any]:
    """The `extra` of a log record: the fields that its line in JSON has beside the message."""
    return {"fields": values}


class TextFormat(logging.Formatter):
    """Formats records as text: 2026-01-31 12:00:00.000 INFO message"""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")


class JsonFormat(logging.Formatter):
    """Formats records as JSON, one object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        more: Mapping[str, Any] = getattr(record, "fields", {})
        line |= {name: value for name, value in more.items() if value is not None}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(options: ServerOptions) -> None:
    """Configures the process's log by the options. The process must be the server's own."""
    made = JsonFormat() if options.log_format == "json" else TextFormat()
    for name, stream in (("", sys.stderr), (ACCESS, sys.stdout)):
        handler = logging.StreamHandler(stream)
        handler.setFormatter(made)
        logging.getLogger(name).handlers = [handler]
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    logging.getLogger().setLevel(max(level, logging.WARNING))
    for name in _OWN:
        logging.getLogger(name).setLevel(level)
    logging.getLogger(ACCESS).propagate = False


def announce(text: str, options: ServerOptions) -> None:
    """Prints a line to stdout, whatever the log's level."""
    line = {"msg": text, "name": __name__, "levelno": logging.INFO, "levelname": "INFO"}
    print(
        JsonFormat().format(logging.makeLogRecord(line)) if options.log_format == "json" else text,
        flush=True,
    )


class Clock:
    """Tells when seconds are over, again and again."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last = time.monotonic()

    def elapsed(self) -> float | None:
        """Seconds since the last call that returned any. None before the period is over."""
        elapsed = time.monotonic() - self._last
        if elapsed < self._seconds:
            return None
        self._last += elapsed
        return elapsed
