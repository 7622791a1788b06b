"""The commands `toolkit kv save`, `toolkit kv list` and `toolkit kv drop`, for a server that
runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
from toolkit_lm.errors import ConfigError
from toolkit_lm_commands import HERE, Key, Url, ask_server, columns

Salt = Annotated[
    str | None,
    typer.Option("--cache-salt", envvar="TOOLKIT_LM_CACHE_SALT", help="Salt of the prefix."),
]


def save(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the prefix.")],
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Text that later prompts begin with.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", exists=True, dir_okay=False, help="File with this text."),
    ] = None,
    messages: Annotated[
        Path | None,
        typer.Option(
            "--messages",
            exists=True,
            dir_okay=False,
            help="JSON file with the messages that later conversations begin with, or with "
            "{messages, tools, chat_template_kwargs}.",
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A model of the server, or an adapter.")
    ] = None,
    cache_salt: Salt = None,
    url: Url = HERE,
    api_key: Key = None,
) -> None:
    """Compute a prefix on a running server, which needs --admin-routes and --kv-cache-dir, and keep
    it on its disk under a name."""
    if [prompt, file, messages].count(None) != 2:
        raise ConfigError("give one of --prompt, --file and --messages.")
    body: dict[str, Any] = {"name": name, "model": model, "cache_salt": cache_salt}
    if messages is not None:
        body |= _conversation(messages)
    else:
        body["prompt"] = _text(file) if file is not None else prompt
    found = ask_server("POST", url, "/kv/prefixes", api_key, body)
    typer.echo(
        f"{found['name']}: {found['num_tokens']} of {found['num_prompt_tokens']} tokens, "
        f"{found['num_bytes'] / 2**20:.2f} MiB, in {found['seconds']:.2f} s."
    )


def list_prefixes(url: Url = HERE, api_key: Key = None) -> None:
    """List the named prefixes of a running server."""
    found = ask_server("GET", url, "/kv/prefixes", api_key)
    rows = [("NAME", "TOKENS", "MIB", "STATE")]
    for prefix in found["prefixes"]:
        state = "complete" if prefix["is_complete"] else "incomplete"
        size = f"{prefix['num_bytes'] / 2**20:.2f}"
        rows.append((prefix["name"], str(prefix["num_tokens"]), size, state))
    for line in columns(rows):
        typer.echo(line)
    typer.echo(f"{found['num_bytes'] / 2**20:.2f} of {found['max_bytes'] / 2**20:.2f} MiB.")


def drop(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Name of the prefix.")
    ] = None,
    cache_salt: Salt = None,
    all_names: Annotated[bool, typer.Option("--all", help="All named prefixes.")] = False,
    tier: Annotated[
        str | None,
        typer.Option("--tier", help="Instead, all that a tier has: kv_disk, kv_host, or device."),
    ] = None,
    url: Url = HERE,
    api_key: Key = None,
) -> None:
    """Drop a named prefix of a running server, those with a salt, or all; or empty a KV tier."""
    if (name, cache_salt, tier).count(None) != (3 if all_names else 2):
        raise ConfigError("give one of NAME, --cache-salt, --all and --tier.")
    if tier is not None:
        ask_server("DELETE", url, f"/kv/tiers/{quote(tier, safe='')}", api_key)
        typer.echo(f"{tier} is empty.")
        return
    if name is not None:
        found = ask_server("DELETE", url, f"/kv/prefixes/{quote(name, safe='')}", api_key)
    else:
        body = {"all": True} if all_names else {"cache_salt": cache_salt}
        found = ask_server("POST", url, "/kv/prefixes/drop", api_key, body)
    typer.echo(f"Dropped: {', '.join(found['dropped']) or 'none'}.")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"option 'file': {file}: {error}") from error


def _conversation(file: Path) -> dict[str, Any]:
    """The messages of a file, with what else the chat template reads. Raises ConfigError."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"option 'messages': {file}: {error}") from error
    if not isinstance(found, dict):
        found = {"messages": found}
    known = ("messages", "tools", "chat_template_kwargs")
    if not isinstance(found.get("messages"), list) or found.keys() - set(known):
        raise ConfigError(
            f"option 'messages': {file} must have a list of messages, or an object of "
            f"{', '.join(known)}."
        )
    return found
