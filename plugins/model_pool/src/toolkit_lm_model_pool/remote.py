"""The commands `toolkit ps`, `toolkit load` and `toolkit unload`, for a server that runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from toolkit_lm_commands import HERE, Key, Url, ask_server, columns

from toolkit_lm_model_pool.need import as_size


def ps(url: Url = HERE, api_key: Key = None) -> None:
    """Show the models of a running server."""
    cards = ask_server("GET", url, "/v1/models", api_key).get("data", [])
    rows = [("MODEL", "STATE", "NEEDS", "TAKES", "REQUESTS", "LOADS")]
    for card in cards:
        # A server of one model tells no state.
        if card.get("parent") is not None:
            continue
        rows.append(
            (
                str(card["id"]),
                _state(card),
                _size(card.get("bytes_needed")),
                _size(card.get("bytes_resident")),
                str(card.get("requests_in_flight", "")),
                str(card.get("loads", "")),
            )
        )
    for line in columns(rows):
        typer.echo(line)
    for card in cards:
        if card.get("reason"):
            typer.echo(f"{card['id']}: {card['reason']}")


def load(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    url: Url = HERE,
    api_key: Key = None,
) -> None:
    """Load a model of a running server, which needs --admin-routes. Ends when it is ready."""
    ask_server("POST", url, "/models/load", api_key, {"model": model})
    typer.echo(f"{model} is ready.")


def unload(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Name of the model. Default: all.")
    ] = None,
    url: Url = HERE,
    api_key: Key = None,
) -> None:
    """Unload a model of a running server, or all but the pinned. The server needs
    --admin-routes."""
    done = ask_server("POST", url, "/unload", api_key, {"model": model})
    typer.echo(f"Unloaded: {', '.join(done.get('models', []))}.")


def _state(card: Mapping[str, Any]) -> str:
    state = str(card.get("state", "ready"))
    progress = card.get("progress")
    return state if progress is None else f"{state} {progress}%"


def _size(num_bytes: object) -> str:
    return as_size(num_bytes) if isinstance(num_bytes, int) else ""
