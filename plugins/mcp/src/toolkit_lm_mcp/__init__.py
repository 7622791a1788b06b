"""Tools of MCP servers in `/v1/responses`. This entry module only registers them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from msgspec import Struct, field
from toolkit_lm.config import parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    from toolkit_lm_server.plugin_routes import OpenAIApi

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s/@:\\\[\]#?%]+)(:[0-9]{1,5})?")


class Options(Struct, frozen=True):
    """`--plugin-option mcp.NAME=...`"""

    hosts: list[str] = field(default_factory=list)
    """Hosts of MCP servers that requests may name: "name", at the scheme's port, or "name:port".
    They must have public addresses, and https. Both lists empty: there are no such tools."""
    private_hosts: list[str] = field(default_factory=list)
    """More such hosts, whose addresses may be of the local network or of this machine, and http."""
    timeout: float = 30.0
    """Seconds within which a server must answer one request."""
    max_bytes: str = "1MiB"
    """Most bytes of an answer of a server."""
    max_servers: int = 8
    """Most servers of a request."""
    max_tools: int = 128
    """Most tools of a request's servers together."""
    max_calls: int = 32
    """Most calls of a response."""

    def __post_init__(self) -> None:
        for host in [*self.hosts, *self.private_hosts]:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"mcp.hosts: {host!r} is not a host: give a name such as 'mcp.example.com', or "
                    "'name:port'."
                )
        if not 0 < self.timeout < float("inf"):
            raise ConfigError(f"mcp.timeout must be a number of seconds, not {self.timeout}.")
        try:
            is_bytes = isinstance(parse_memory(self.max_bytes), int)
        except ConfigError:
            is_bytes = False
        if not is_bytes:
            raise ConfigError(
                f"mcp.max_bytes must be a number of bytes, such as '1MiB', not {self.max_bytes!r}."
            )
        for name in ("max_servers", "max_tools", "max_calls"):
            if getattr(self, name) < 1:
                raise ConfigError(f"mcp.{name} must be at least 1, not {getattr(self, name)}.")


@hookimpl(optionalhook=True)
def toolkit_register_routes(options: Options, api: OpenAIApi) -> None:
    if options.hosts or options.private_hosts:
        from toolkit_lm_mcp.making import making_kind

        api.responses.kinds["mcp"] = making_kind(options)
