"""The options of the server."""

from __future__ import annotations

import re
import resource
import sys
from typing import Annotated, Literal

from msgspec import Struct, field
from toolkit_lm.config import option, parse_memory
from toolkit_lm.errors import ConfigError

HostedTools = Literal["ignore", "refuse"]

_MOST_CONNECTIONS = 10_000
"""Default of most connections, where the process may have that many files open."""
_OTHER_FILES = 64
"""File descriptors that are not connections: the server's own, and connections that are refused."""
_LEAST_FILES = 32
"""File descriptors that the server cannot do without. Connections get a part of the others by
default."""


class HttpOptions(Struct, frozen=True, kw_only=True):
    """Options of any command that listens: its address, its clients and its log."""

    host: Annotated[str, option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on. 0: a free one.", ge=0, le=65535)] = 8000
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
    api_keys_file: Annotated[
        str | None, option("YAML file of API keys, each with a name and limits.", none="no file")
    ] = None
    max_body_size: Annotated[str, option("Maximum size of a request body ('16MiB').")] = "16MiB"
    max_connections: Annotated[
        int | None,
        option(
            "Maximum number of connections.",
            ge=1,
            none="three quarters of the free file descriptors, at most 10,000",
        ),
    ] = None
    max_header_size: Annotated[str, option("Maximum size of a request's headers ('16KiB').")] = (
        "16KiB"
    )
    header_timeout: Annotated[
        int, option("Seconds within which all headers of a request must have come.", ge=1)
    ] = 10
    body_timeout: Annotated[
        int, option("Seconds within which the whole body of a request must have come.", ge=1)
    ] = 60
    keep_alive_timeout: Annotated[
        int, option("Seconds that a connection may wait for its next request.", ge=1)
    ] = 60
    write_timeout: Annotated[
        int,
        option(
            "Seconds within which a client must read on: a KiB of its answer for each of them.",
            ge=1,
        ),
    ] = 30
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
        int, option("Seconds that running requests get to finish when the server stops.", ge=0)
    ] = 10

    def __post_init__(self) -> None:
        self._check_sizes("max_body_size", "max_header_size")
        if not re.fullmatch("0?[0-7]{3}", self.uds_mode):
            raise ConfigError(
                f"uds_mode must be three octal digits, such as '660', not {self.uds_mode!r}."
            )
        if self.ssl_certfile is None and (
            self.ssl_keyfile is not None or self.ssl_ca_certs is not None
        ):
            raise ConfigError(
                "ssl_keyfile and ssl_ca_certs need ssl_certfile: there is no TLS without a "
                "certificate."
            )
        if self.max_connections is not None and self.max_connections > (
            most := _open_files() - _OTHER_FILES
        ):
            raise ConfigError(
                f"max_connections is {self.max_connections}, but the open files of this process "
                f"(ulimit -n) allow {most}."
            )
        if self.api_key is not None and not all(self.own_keys or [""]):
            raise ConfigError("api_key is empty. Give a key, or none at all.")
        if not all(
            key.isascii() and key.isprintable() and key == key.strip() for key in self.own_keys
        ):
            raise ConfigError(
                "api_key must be printable ASCII characters, without spaces around it: others do "
                "not fit in a header."
            )

    def _check_sizes(self, *names: str) -> None:
        for name in names:
            try:
                is_bytes = isinstance(parse_memory(getattr(self, name)), int)
            except ConfigError:
                is_bytes = False
            if not is_bytes:
                raise ConfigError(
                    f"{name} must be a number of bytes, such as '16MiB', not "
                    f"{getattr(self, name)!r}."
                )

    @property
    def own_keys(self) -> list[str]:
        """The keys that are options, without those in a file."""
        return [self.api_key] if isinstance(self.api_key, str) else self.api_key or []

    @property
    def needs_key(self) -> bool:
        """Whether clients must send an API key."""
        return self.api_key is not None or self.api_keys_file is not None

    @property
    def max_body_bytes(self) -> int:
        return int(parse_memory(self.max_body_size))

    @property
    def max_header_bytes(self) -> int:
        return int(parse_memory(self.max_header_size))

    @property
    def num_connections(self) -> int:
        """Most connections: `max_connections`, or its default in this process."""
        return self.max_connections or min(
            max((_open_files() - _LEAST_FILES) * 3 // 4, 4), _MOST_CONNECTIONS
        )


class ServerOptions(HttpOptions, frozen=True, kw_only=True):
    """Options of the server: its address, its clients, and its limits."""

    tool_call_parser: Annotated[
        str,
        option(
            "How the model's tool calls are read: the name of a parser, auto (by the chat "
            "template), or none."
        ),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        option(
            "How the model's reasoning is separated from the answer: the name of a parser, auto "
            "(by the chat template), or none."
        ),
    ] = "auto"
    routes: Annotated[
        list[str] | None,
        option(
            "Plugins whose HTTP routes are served, by name.",
            none="those of anthropic, cohere, ollama that are installed",
        ),
    ] = None
    ui: Annotated[bool, option("Serve the page at /: a chat, and a live view of the engine.")] = (
        True
    )
    tokenizer_info: Annotated[
        bool, option("Serve GET /tokenizer_info: the tokenizer's config and chat template.")
    ] = False
    admin_routes: Annotated[
        bool, option("Serve the routes for operators: POST /reset_prefix_cache.")
    ] = False
    force_include_usage: Annotated[
        bool,
        option("Report usage in each event of a stream, even if the request does not ask for it."),
    ] = False
    strict_fields: Annotated[
        bool, option("Refuse unknown fields of requests. Off: they are ignored, with a warning.")
    ] = False
    hosted_tools: Annotated[
        HostedTools,
        option(
            "Tools of requests that a vendor's server runs, such as web_search: ignore leaves them "
            "out, with a warning; refuse makes them an error."
        ),
    ] = "ignore"
    allow_request_chat_template: Annotated[
        bool, option("Take chat templates of requests. They are rendered in a sandbox.")
    ] = False
    allowed_origins: Annotated[
        list[str],
        option(
            "Origins whose pages may use the server from a browser (CORS), such as "
            "'https://chat.example'. '*': any page."
        ),
    ] = field(default_factory=list)
    allowed_methods: Annotated[list[str], option("Methods that these pages may use. '*': all.")] = (
        field(default_factory=lambda: ["*"])
    )
    allowed_headers: Annotated[
        list[str], option("Headers that these pages may send. '*': all.")
    ] = field(default_factory=lambda: ["*"])
    allow_credentials: Annotated[
        bool, option("Let these pages send cookies and certificates of their users.")
    ] = False
    middleware: Annotated[
        list[str],
        option(
            "ASGI middleware around the app, the first outermost: module:Class, or a function "
            "(request, call_next). It is trusted code."
        ),
    ] = field(default_factory=list)
    max_request_cost: Annotated[
        str,
        option(
            "Maximum memory that a request could take, estimated from its fields: prompts x n, "
            "logprobs, ... ('512MiB')."
        ),
    ] = "512MiB"
    max_stored_responses: Annotated[
        int,
        option(
            "Answers of /v1/responses that are kept in memory, so that previous_response_id can "
            "name them, and as many conversations, and chats with store true. 0: none.",
            ge=0,
        ),
    ] = 0
    max_prompts: Annotated[
        int, option("Maximum number of prompts in a completion request.", ge=1)
    ] = 256
    max_inputs: Annotated[
        int,
        option("Maximum number of inputs in a request for embeddings, classes or scores.", ge=1),
    ] = 2048
    sse_keep_alive: Annotated[
        int | None,
        option(
            "Seconds after which a stream that has nothing to send sends a comment.",
            ge=1,
            none="no comments",
        ),
    ] = 15
    root_path: Annotated[str, option("Path prefix that a reverse proxy strips.")] = ""
    drain_delay: Annotated[
        int,
        option(
            "Seconds for which a server that is stopped still takes requests, while /health is "
            "503: in them, balancers turn to others.",
            ge=0,
        ),
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_sizes("max_request_cost")
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "allow_credentials needs allowed_origins by name: with '*', any page could act "
                "for its reader."
            )

    @property
    def max_request_bytes(self) -> int:
        return int(parse_memory(self.max_request_cost))


def _open_files() -> int:
    """Number of files that the process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
