"""The server's options."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct, field
from toolkit_lm.config import option, parse_memory
from toolkit_lm.errors import ConfigError


class ServerOptions(Struct, frozen=True, kw_only=True):
    """Where the server listens, who may use it, and what it takes."""

    host: Annotated[str, option("Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("Port to listen on. 0: a free one.", ge=0, le=65535)] = 8000
    api_key: Annotated[str | None, option("Key that clients must send; /health and /ready need none. Default: none needed.")] = None
    routes: Annotated[list[str], option("Plugins whose HTTP routes are on.")] = field(default_factory=list)
    admin_routes: Annotated[bool, option("Serve the routes for operators: POST /reset_prefix_cache.")] = False
    max_body_size: Annotated[str, option("Largest request body, in bytes ('16MiB').")] = "16MiB"
    max_prompts: Annotated[int, option("Most prompts in one completion request.", ge=1)] = 256
    max_inputs: Annotated[int, option("Most inputs in one request for embeddings, classes or scores.", ge=1)] = 2048
    root_path: Annotated[str, option("Path prefix that a proxy in front strips.")] = ""
    log_level: Annotated[Literal["critical", "error", "warning", "info", "debug"], option("What the HTTP server logs.")] = "info"
    access_log: Annotated[bool, option("Log each HTTP request.")] = True
    shutdown_timeout: Annotated[int, option("Seconds that requests under way get to end when the server is told to stop.", ge=0)] = 10

    def __post_init__(self) -> None:
        if not isinstance(parse_memory(self.max_body_size), int):
            raise ConfigError(f"max_body_size must be a number of bytes, such as '16MiB', not {self.max_body_size!r}.")
        if self.api_key == "":
            raise ConfigError("api_key is empty. Give a key, or none at all.")

    @property
    def max_body_bytes(self) -> int:
        return int(parse_memory(self.max_body_size))
