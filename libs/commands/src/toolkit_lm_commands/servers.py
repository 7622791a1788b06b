"""Commands that ask a server that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import httpx
import typer
from toolkit_lm.errors import ConfigError, ToolkitError

Url = Annotated[str, typer.Option("--url", help="Address of the server.")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="TOOLKIT_LM_API_KEY", help="Key of the server.")
]
HERE = "http://127.0.0.1:8000"
"""Address of a server on this machine."""
_TIMEOUT = httpx.Timeout(1800, connect=10)


def ask_server(
    method: str, url: str, path: str, key: str | None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns a server's answer, an object. Raises ConfigError for an address that is none, and
    ToolkitError for an error, which it words."""
    address = url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        response = httpx.request(
            method, address + path, json=body, headers=headers, timeout=_TIMEOUT
        )
        answer = response.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(
            f"option 'url': {url!r} is not the address of a server: {error}"
        ) from error
    except httpx.HTTPError as error:
        raise ToolkitError(f"no answer from the server at {address}: {error}") from error
    except ValueError as error:
        raise ToolkitError(f"the server at {address} answers no JSON.") from error
    if response.is_error or not isinstance(answer, dict):
        reason = answer.get("error", answer) if isinstance(answer, dict) else answer
        words = reason.get("message", reason) if isinstance(reason, dict) else reason
        if response.status_code == 404 and words == "Not Found":
            raise ToolkitError(
                f"the server at {address} has no {method} {path}: an option opens it, or a plugin "
                "brings it."
            )
        raise ToolkitError(f"the server refused the request ({response.status_code}): {words}")
    return answer


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
