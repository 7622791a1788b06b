"""How a front and a shared engine meet: over a Unix socket that their user alone can reach."""

from __future__ import annotations

import os
import socket
import struct

from msgspec import Struct

_MOST = 4096
"""Most bytes of the welcome."""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a peer, as Linux tells them."""


class Welcome(Struct):
    """The only message over the connection, a line of JSON from the engine."""

    address: str
    """The ZeroMQ socket of this front, in a folder that the user alone may enter."""
    pid: int
    """The engine's process."""


def check_peer(connection: socket.socket) -> None:
    """Raises PermissionError where the other end is another user's."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"the other end is of user {user}, and not of {os.geteuid()}")


def read_line(connection: socket.socket) -> bytes:
    """The welcome. Raises OSError where the connection ends before."""
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(_MOST - len(line))
        if not part:
            raise ConnectionError("the connection has ended")
        line += part
    return line
