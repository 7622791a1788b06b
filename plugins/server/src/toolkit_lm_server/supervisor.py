"""Messages to systemd, as sd_notify(3) defines them: datagrams to the socket that NOTIFY_SOCKET
names."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

_TIMEOUT = 1.0
"""Most seconds that a message waits for room in the socket."""
_SHARE = 3
"""Signs of life in each period of the watchdog."""


class Supervisor:
    """Tells systemd what the server is doing. Does nothing where nobody listens."""

    def __init__(self, address: str | None = None, watchdog: float | None = None) -> None:
        """`address`: the path of a Unix socket, or @ and an abstract name. `watchdog`: seconds
        within which a sign of life is awaited."""
        self._address = f"\0{address[1:]}" if address and address.startswith("@") else address
        self._period = None if watchdog is None else watchdog / _SHARE
        self._last = 0.0

    @classmethod
    def of_environ(cls, environ: MutableMapping[str, str]) -> Supervisor:
        """The supervisor that systemd's variables name. They are removed: what this process starts
        does not speak for it."""
        address = environ.pop("NOTIFY_SOCKET", "")
        microseconds = environ.pop("WATCHDOG_USEC", "")
        process = environ.pop("WATCHDOG_PID", "") or str(os.getpid())
        if address and not address.startswith(("/", "@")):
            logger.warning("NOTIFY_SOCKET is %r: only Unix sockets are supported", address)
            address = ""
        is_watched = microseconds.isdecimal() and process == str(os.getpid())
        return cls(address or None, int(microseconds) / 1e6 if is_watched else None)

    def ready(self, status: str) -> None:
        """The server serves, or has reloaded its files. `status`: a line for people."""
        self._send("READY=1", f"STATUS={status}")

    def reloading(self) -> None:
        """The server begins to reload its files."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self, status: str) -> None:
        """The server begins to end."""
        self._send("STOPPING=1", f"STATUS={status}")

    def alive(self) -> None:
        """A sign of life, where it is time for one. Call it often."""
        if self._period is not None and time.monotonic() - self._last >= self._period:
            self._last = time.monotonic()
            self._send("WATCHDOG=1")

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        message = "\n".join(line.replace("\n", " ") for line in lines)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_TIMEOUT)
                sender.sendto(message.encode(), self._address)
        except OSError as error:
            logger.warning("systemd could not be told %s: %s", lines[0], error)
            if not isinstance(error, TimeoutError):
                # The socket is gone, and does not come back.
                self._address = None
