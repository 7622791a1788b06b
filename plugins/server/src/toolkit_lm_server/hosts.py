"""The check of a request's Host header.

A web page in a browser on this machine can give its own name our address (DNS rebinding). It could
then ask this server as if it were its own.
"""

from __future__ import annotations

import ipaddress
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from toolkit_lm_server.errors import ApiError, printable
from toolkit_lm_server.listening import is_unix
from toolkit_lm_server.options import ServerOptions

_LOCAL = ("localhost", "127.0.0.1", "[::1]")


def host_names(options: ServerOptions, listener: socket.socket) -> frozenset[str] | None:
    """The hosts that requests may name. None allows any."""
    if is_unix(listener):
        # No browser's.
        return (
            frozenset(name.lower() for name in (*_LOCAL, *options.allowed_hosts))
            if options.allowed_hosts
            else None
        )
    address = listener.getsockname()[0]
    is_local = ipaddress.ip_address(address.partition("%")[0]).is_loopback
    if not options.allowed_hosts and (options.needs_key or not is_local):
        return None
    own = f"[{address}]" if ":" in address else address
    return frozenset(name.lower() for name in (*_LOCAL, own, options.host, *options.allowed_hosts))


class HostCheck:
    """Refuses requests (403) that name other hosts. HTTP/1.0 requests without a Host header do not
    come from browsers."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self._app = app
        self._names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host")
        if self._names is None or host is None or _without_port(host.lower()) in self._names:
            await self._app(scope, receive, send)
            return
        error = ApiError(
            403,
            f"The Host header names {printable(host)!r}, not this server. Add the name to the "
            "option allowed_hosts, or set an API key.",
            code="host_not_allowed",
        )
        await error.response()(scope, receive, send)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
