"""The commands `toolkit ps`, `toolkit load` and `toolkit unload`, for a server that runs."""

from __future__ import annotations

from typing import Annotated, Any

import httpx
import typer
from toolkit_lm.errors import ConfigError, ToolkitError

from toolkit_lm_model_pool.need import as_size

Url = Annotated[str, typer.Option("--url", help="Address of the server.")]
Key = Annotated[
    str | None, typer.Option("--api-key", envvar="TOOLKIT_LM_API_KEY", help="Key of the server.")
]
_HERE = "http://127.0.0.1:8000"
_TIMEOUT = httpx.Timeout(1800, connect=10)


def ps(url: Url = _HERE, api_key: Key = None) -> None:
    """Show the models of a running server."""
    cards = _asked("GET", url, "/v1/models", api_key).get("data", [])
    rows = [("MODEL", "STATE", "NEEDS", "TAKES", "REQUESTS", "LOADS")]
    for card in cards:
        # A server of one model tells no state.
        if card.get("parent") is not None:
            continue
        rows.append(
            (
                str(card["id"]),
                str(card.get("state", "ready")),
                _size(card.get("bytes_needed")),
                _size(card.get("bytes_resident")),
                str(card.get("requests_in_flight", "")),
                str(card.get("loads", "")),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, strict=True)
        typer.echo("  ".join(cell.ljust(width) for cell, width in cells).rstrip())
    for card in cards:
        if card.get("reason"):
            typer.echo(f"{card['id']}: {card['reason']}")


def load(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    url: Url = _HERE,
    api_key: Key = None,
) -> None:
    """Load a model of a running server, which needs --admin-routes. Ends when it is ready."""
    _asked("POST", url, "/models/load", api_key, {"model": model})
    typer.echo(f"{model} is ready.")


def unload(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Name of the model. Default: all.")
    ] = None,
    url: Url = _HERE,
    api_key: Key = None,
) -> None:
    """Unload a model of a running server, or all but the pinned. The server needs
    --admin-routes."""
    done = _asked("POST", url, "/unload", api_key, {"model": model})
    typer.echo(f"Unloaded: {', '.join(done.get('models', []))}.")


def _asked(
    method: str, url: str, path: str, key: str | None, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The answer of a server. Raises ConfigError and ToolkitError."""
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
        raise ToolkitError(f"the server refused the request ({response.status_code}): {words}")
    return answer


def _size(num_bytes: object) -> str:
    return as_size(num_bytes) if isinstance(num_bytes, int) else ""
