"""Connections between nodes: the master's address, the key of the launch, and encrypted sockets."""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import platform
import socket
import struct
import sys
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import zmq
import zmq.utils.z85
from toolkit_lm.config import NodeConfig
from toolkit_lm.errors import ConfigError

KEY_VARIABLE = "TOOLKIT_LM_LAUNCH_KEY"
_ATTACH_FILTER = 26
_DETACH_FILTER = 27
"""Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER, which Python does not name."""
_LEAST_KEY = 16
"""Least characters of the secret."""
_MOST_KEY = 4096
"""Most bytes that are read of the secret's file."""
_BEAT = 1000
"""Milliseconds between two heartbeats of a ZeroMQ socket."""


class Master(NamedTuple):
    """The address of node 0."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str | None) -> Master:
        """Parses HOST:PORT. Raises ConfigError for any other text, and for None."""
        if text is None:
            raise ConfigError(
                "several nodes need master='HOST:PORT': the address of node 0 at which the "
                "others reach it."
            )
        try:
            parts = urlsplit(f"//{text}")
            host = parts.hostname
            port = parts.port
        except ValueError:
            host = None
            port = None
        if not host or not port or parts.netloc != text or "@" in text:
            raise ConfigError(
                f"option 'master': {text!r} is no HOST:PORT, such as 10.0.0.1:29500 or "
                "[fd00::1]:29500."
            )
        return cls(host, port)

    def resolve(self) -> str:
        """The master's IP address. Raises OSError."""
        return str(socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0][4][0])


def read_key(config: NodeConfig) -> bytes:
    """The key of the launch: the SHA-256 digest of the secret, which a file or the environment
    holds. Raises ConfigError."""
    if config.launch_key_file is None:
        where = f"the environment variable {KEY_VARIABLE}"
        secret = os.environ.get(KEY_VARIABLE, "").strip().encode()
        if not secret:
            raise ConfigError(
                "several nodes need a secret that they share: give launch_key_file='FILE', or "
                f"set {KEY_VARIABLE}."
            )
    else:
        where = f"the file {config.launch_key_file!r} (launch_key_file)"
        try:
            with Path(config.launch_key_file).open("rb") as file:
                secret = file.read(_MOST_KEY).strip()
        except OSError as error:
            raise ConfigError(f"{where} cannot be read: {error}") from error
    if len(secret) < _LEAST_KEY:
        raise ConfigError(
            f"the secret in {where} has {len(secret)} characters: it needs {_LEAST_KEY}. "
            "`openssl rand -hex 32` makes one."
        )
    return hashlib.sha256(secret).digest()


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    key: bytes,
    timeout: float,
    *,
    is_master: bool,
) -> zmq.Socket[bytes]:
    """Makes a socket between machines, with ZeroMQ's CURVE encryption. Only holders of `key` can
    connect.

    `timeout`: seconds without a heartbeat after which the other machine counts as lost.

    The master's key pair is derived from the launch key. Neither crosses the network.
    """
    made = context.socket(kind)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        made.setsockopt(option, 0)
    made.setsockopt(zmq.IPV6, 1)
    made.setsockopt(zmq.HEARTBEAT_IVL, _BEAT)
    made.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * timeout))
    made.setsockopt(zmq.HEARTBEAT_TTL, round(1000 * timeout))
    secret = zmq.utils.z85.encode(hmac.digest(key, b"toolkit_lm master", "sha256"))
    if is_master:
        made.setsockopt(zmq.CURVE_SERVER, 1)
        made.setsockopt(zmq.CURVE_SECRETKEY, secret)
    else:
        made.setsockopt(zmq.CURVE_SERVERKEY, zmq.curve_public(secret))
        public, own = zmq.curve_keypair()
        made.setsockopt(zmq.CURVE_PUBLICKEY, public)
        made.setsockopt(zmq.CURVE_SECRETKEY, own)
        made.setsockopt(zmq.RECONNECT_IVL, 100)
        made.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    return made


def endpoint(address: str, port: int | str) -> str:
    """The ZeroMQ endpoint of a TCP port. `port`: "*" is any free one."""
    return f"tcp://[{address}]:{port}" if ":" in address else f"tcp://{address}:{port}"


def shut(listener: socket.socket) -> None:
    """Has the kernel drop all packets that come to a listening socket. Linux only.

    Connections that exist stay open, and no further one can be made. It is for sockets that a
    library owns and must close itself.
    """
    if sys.platform == "linux":
        # A program of one instruction for its packet filter: return 0 bytes of each packet.
        program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
        listener.setsockopt(
            socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(program))
        )


def unshut(listener: socket.socket) -> None:
    """Undoes `shut`: the socket accepts connections again."""
    if sys.platform == "linux":
        listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def versions() -> dict[str, str]:
    """Versions that must be equal on all nodes, beside the plugins' own. Imports none of the
    packages."""
    found = {name: version(name) for name in ("toolkit-lm-core", "torch", "msgspec")}
    return {"python": ".".join(platform.python_version_tuple()[:2]), **found}
