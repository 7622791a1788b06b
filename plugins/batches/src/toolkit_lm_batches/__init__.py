"""OpenAI's files and batches over HTTP: requests in files, answered beside live ones. This entry
module only registers the routes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from msgspec import Struct
from toolkit_lm.config import parse_memory
from toolkit_lm.errors import ConfigError
from toolkit_lm.plugin import hookimpl

if TYPE_CHECKING:
    from fastapi import APIRouter
    from toolkit_lm_server.plugin_routes import OpenAIApi


class Options(Struct, frozen=True):
    """`--plugin-option batches.NAME=...`"""

    folder: str | None = None
    """Folder of files and batches, which survive the server. None: there are no such routes."""
    max_files: int = 1000
    """Most files, and most batches. A client may have seven eighths of what others leave."""
    max_bytes: str = "4GiB"
    """Most bytes of all files. A client may have seven eighths of what others leave."""
    max_rows: int = 50_000
    """Most requests of a batch."""
    concurrency: int = 8
    """Requests of batches under way at a time."""

    def __post_init__(self) -> None:
        try:
            is_bytes = isinstance(parse_memory(self.max_bytes), int)
        except ConfigError:
            is_bytes = False
        if not is_bytes:
            raise ConfigError(
                "batches.max_bytes must be a number of bytes, such as '4GiB', not "
                f"{self.max_bytes!r}."
            )
        for name in ("max_files", "max_rows", "concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"batches.{name} must be at least 1, not {getattr(self, name)}.")


@hookimpl(optionalhook=True)
def toolkit_register_routes(
    router: APIRouter, options: Options, api: OpenAIApi
) -> Callable[[], AbstractAsyncContextManager[object]] | None:
    if options.folder is None:
        return None
    from toolkit_lm_batches.routes import add_routes

    return add_routes(router, options, api)
