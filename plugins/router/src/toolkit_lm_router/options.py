"""The options of the router."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Struct, field
from toolkit_lm.config import option, parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.options import ServerOptions


class RouterOptions(Struct, frozen=True, kw_only=True):
    """Options of the router: its backends, where requests go, its address and its clients."""

    backend: Annotated[
        list[str],
        option("URL of a server that requests go to, such as 'http://10.0.0.2:8000'."),
    ] = field(default_factory=list)
    backend_key: Annotated[
        str | None,
        option(
            "API key that backends get in place of the client's.", none="the client's is passed on"
        ),
    ] = None
    admin_key: Annotated[
        str | None,
        option(
            "API key of operators, who may list, add, drain and remove backends.",
            none="nobody may",
        ),
    ] = None
    max_backend_requests: Annotated[
        int, option("Most requests of a backend at a time. Others wait here.", ge=1)
    ] = 256
    max_queued_requests: Annotated[
        int, option("Most requests that wait here. Further ones are refused with 503.", ge=0)
    ] = 4096
    queue_timeout: Annotated[
        float, option("Seconds that a request waits here before it is refused with 503.", gt=0)
    ] = 60.0
    read_timeout: Annotated[
        float,
        option("Seconds without a byte of an answer after which a backend has failed.", gt=0),
    ] = 600.0
    connect_timeout: Annotated[
        float, option("Seconds within which a backend must take a connection.", gt=0)
    ] = 5.0
    health_interval: Annotated[
        float, option("Seconds from one check of a backend's health to the next.", gt=0)
    ] = 2.0
    retries: Annotated[
        int,
        option(
            "Most further backends that a request is sent to when one fails before its answer "
            "has begun.",
            ge=0,
        ),
    ] = 2
    migrations: Annotated[
        int,
        option(
            "Most times that a stream which has begun goes on on another backend. 0: it ends with "
            "an error.",
            ge=0,
        ),
    ] = 2
    prefix_match: Annotated[
        float,
        option(
            "Least share of a prompt that a backend must have had before, for the request to go "
            "there. Below, the less loaded of two random backends is taken.",
            ge=0,
            le=1,
        ),
    ] = 0.25
    balance: Annotated[
        float,
        option(
            "Most load of a backend that gets a request for its prefix or session, as a multiple "
            "of the mean.",
            ge=1,
        ),
    ] = 1.5
    prefix_memory: Annotated[
        str, option("Memory for the prefixes that one backend has had ('8MiB').")
    ] = "8MiB"

    host: Annotated[str, option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on. 0: a free one.", ge=0, le=65535)] = 8080
    uds: Annotated[
        str | None,
        option("Path of a Unix socket to listen on, in place of host and port.", none="no socket"),
    ] = None
    uds_mode: Annotated[
        str,
        option(
            "Permissions of that socket, in octal. 600: its owner's programs alone; 660: its "
            "group's, too."
        ),
    ] = "600"
    ssl_certfile: Annotated[
        str | None, option("PEM file of the certificate for TLS, with its chain.", none="no TLS")
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        option("PEM file of the certificate's private key.", none="in the certificate's file"),
    ] = None
    ssl_ca_certs: Annotated[
        str | None,
        option(
            "PEM file of authorities: clients must have a certificate of theirs.",
            none="clients need none",
        ),
    ] = None
    api_key: Annotated[
        list[str] | str | None,
        option(
            "API key that clients must send, except to /live, /health, /ready and /ping. If "
            "several are given, each is valid.",
            none="none needed",
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str],
        option(
            "Hosts that requests may name in their Host header, as well as this machine's. "
            "Checked on loopback without an API key."
        ),
    ] = field(default_factory=list)
    max_body_size: Annotated[str, option("Maximum size of a request body ('16MiB').")] = "16MiB"
    max_connections: Annotated[
        int | None,
        option(
            "Maximum number of connections.",
            ge=1,
            none="three quarters of the free file descriptors, at most 10,000",
        ),
    ] = None
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"],
        option("Log level of the HTTP server."),
    ] = "info"
    log_format: Annotated[Literal["text", "json"], option("Form of the log's lines.")] = "text"
    access_log: Annotated[
        bool,
        option(
            "Log each HTTP request, but for /health, /metrics and the like. Off: those that failed."
        ),
    ] = True
    shutdown_timeout: Annotated[
        int, option("Seconds that running requests get to finish when the router stops.", ge=0)
    ] = 60

    def __post_init__(self) -> None:
        for url in self.backend:
            check_url(url)
        _ = self.server, self.max_prefix_bytes
        for name in ("backend_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not (
                key and key.isascii() and key.isprintable() and key == key.strip()
            ):
                raise ConfigError(
                    f"{name} must be printable ASCII characters, without spaces around it: others "
                    "do not fit in a header."
                )

    @property
    def server(self) -> ServerOptions:
        """The part that is the HTTP server's."""
        names = set(RouterOptions.__struct_fields__) & set(ServerOptions.__struct_fields__)
        return ServerOptions(**{name: getattr(self, name) for name in names})

    @property
    def max_prefix_bytes(self) -> int:
        """Bytes of memory for the prefixes of one backend. Raises ConfigError."""
        try:
            size = parse_memory(self.prefix_memory)
        except ConfigError:
            size = None
        if not isinstance(size, int):
            raise ConfigError(
                f"prefix_memory must be a number of bytes, such as '8MiB', not "
                f"{self.prefix_memory!r}."
            )
        return size


def check_url(url: str) -> str:
    """The URL of a backend without a slash at its end. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts = urlsplit("")
        port = None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or parts.username is not None
        or parts.query
        or parts.fragment
        or not (url.isascii() and url.isprintable() and " " not in url)
    ):
        raise ConfigError(
            f"option 'backend': {url[:200]!r} is not the URL of a server: write "
            "'http://HOST:PORT', with a path where the server has one."
        )
    return url.rstrip("/").removesuffix("/v1")
