"""The options of the router."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import field, structs
from toolkit_lm.config import option, parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm_server.options import HttpOptions, ServerOptions


class RouterOptions(HttpOptions, frozen=True, kw_only=True):
    """Options of the router: its backends, where requests go, its address and its clients."""

    backend: Annotated[
        list[str],
        option("URL of a server that requests go to, such as 'http://10.0.0.2:8000'."),
    ] = field(default_factory=list)
    prefill_backend: Annotated[
        list[str],
        option(
            "URL of a server that computes long prompts, whose KV blocks the others fetch "
            "(kv_transfer)."
        ),
    ] = field(default_factory=list)
    prefill_min_bytes: Annotated[
        int, option("Least bytes of a request whose prompt is computed there.", ge=0)
    ] = 4096
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
    kv_events: Annotated[
        bool,
        option(
            "Follow the KV events of backends that publish them (kv_events.enabled and "
            "admin_routes): prefixes that they hold, whoever sent them, and that they evict."
        ),
    ] = False
    prefix_memory: Annotated[
        str, option("Memory for the prefixes that one backend has had ('8MiB').")
    ] = "8MiB"

    port: Annotated[int, option("Port to listen on. 0: a free one.", ge=0, le=65535)] = 8080
    shutdown_timeout: Annotated[
        int, option("Seconds that running requests get to finish when the router stops.", ge=0)
    ] = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("backend", "prefill_backend"):
            for url in getattr(self, name):
                check_url(url, name)
        if both := {*self.backend} & {*self.prefill_backend}:
            raise ConfigError(
                f"prefill_backend: {min(both)} is a backend, too. Give a server one of the roles."
            )
        _ = self.max_prefix_bytes
        for name in ("backend_key", "admin_key"):
            key = getattr(self, name)
            if key is not None and not (
                key and key.isascii() and key.isprintable() and key == key.strip()
            ):
                raise ConfigError(
                    f"{name} must be printable ASCII characters, without spaces around it: others "
                    "do not fit in a header."
                )

    def shared_by(self, num_routers: int) -> RouterOptions:
        """The options of each of several routers in front of the same backends: bounds are divided
        among them. Raises ConfigError for what a router does not do beside others."""
        if num_routers == 1:
            return self
        if self.admin_key is not None:
            raise ConfigError(
                f"admin_key: an operator's request would reach one of {num_routers} routers. Have "
                "one router, or leave the key out."
            )
        bounds = {
            name: getattr(self, name) // num_routers
            for name in ("max_backend_requests", "max_queued_requests")
        }
        for name, bound in bounds.items():
            if not bound and (whole := getattr(self, name)):
                raise ConfigError(
                    f"{name} must be at least {num_routers}, the number of routers that share it, "
                    f"not {whole}."
                )
        return structs.replace(self, **bounds)

    @property
    def server(self) -> ServerOptions:
        """The part that is the HTTP server's."""
        return ServerOptions(**{n: getattr(self, n) for n in HttpOptions.__struct_fields__})

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


def check_url(url: str, name: str = "backend") -> str:
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
            f"option {name!r}: {url[:200]!r} is not the URL of a server: write "
            "'http://HOST:PORT', with a path where the server has one."
        )
    return url.rstrip("/").removesuffix("/v1")
