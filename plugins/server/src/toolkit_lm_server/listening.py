"""The sockets on which the server listens: a port or a Unix socket, with TLS or without."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from toolkit_lm.errors import ConfigError

from toolkit_lm_server.options import ServerOptions

UNIX = "unix"
"""The address of clients of a Unix socket."""
_TRY = 1.0
"""Seconds in which a server at a Unix socket takes a connection."""


@contextmanager
def listen(options: ServerOptions) -> Iterator[socket.socket]:
    """A socket that listens on the options' address. Raises ConfigError when it cannot be had."""
    if options.uds is None:
        with bind(options.host, options.port) as listener:
            yield listener
        return
    with bind_unix(options.uds, int(options.uds_mode, 8)) as listener:
        made = os.stat(options.uds)
        try:
            yield listener
        finally:
            # Another server may have taken the place.
            with suppress(OSError):
                if os.path.samestat(os.stat(options.uds), made):
                    os.unlink(options.uds)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens on the address. Raises ConfigError when it cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # asyncio turns Nagle's algorithm off for sockets that name their protocol, and for no
        # others.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(
            f"option 'host': {host!r} is not an address to listen on: {error}"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Two servers can bind the same address; only one can listen on it.
        listener.listen()
        return listener
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        hint = " Is another server running there? --port 0 takes a free port." if in_use else ""
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}.{hint}"
        ) from error


def bind_unix(path: str, mode: int) -> socket.socket:
    """A Unix socket that listens at `path` with these permissions. It replaces a socket that no
    server listens on any more.

    Raises ConfigError when it cannot be had.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        # Before it listens, nobody can connect.
        os.chmod(path, mode)
        listener.listen()
        return listener
    except OSError as error:
        listener.close()
        # A path that is too long has no errno.
        raise ConfigError(
            f"option 'uds': cannot listen on {path!r}: {error.strerror or error}."
        ) from error
    except ConfigError:
        listener.close()
        raise


def _remove_stale(path: str) -> None:
    """Removes a socket that a server left behind, and nothing else."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"option 'uds': {path!r} is there already, and is no socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_TRY)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
        else:
            raise ConfigError(f"option 'uds': another server listens on {path!r}.")


def is_unix(listener: socket.socket) -> bool:
    return listener.family == socket.AF_UNIX


def url_of(listener: socket.socket, *, secure: bool = False) -> str:
    """The address that a socket listens on, for people."""
    if is_unix(listener):
        return f"unix:{listener.getsockname()}"
    host, port, *_ = listener.getsockname()
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """The TLS context of connections. None where they are not secured. Raises ConfigError for files
    that cannot be used."""
    if options.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # The protocol is HTTP/1.1: others need not be tried.
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, _no_password)
    except (OSError, ValueError) as error:
        files = f"{options.ssl_certfile!r}, ssl_keyfile {options.ssl_keyfile!r}"
        raise ConfigError(
            f"options 'ssl_certfile' {files}: they are no certificate with its key: {_why(error)}."
        ) from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"option 'ssl_ca_certs': {options.ssl_ca_certs!r} has no certificates: "
                f"{_why(error)}."
            ) from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is asked for its password")


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
