"""Options that are lists."""

from __future__ import annotations

import msgspec
from toolkit_lm.errors import ConfigError


def listed(value: list[str] | str, name: str) -> list[str]:
    """The entries of an option: a list, also in JSON, or with commas. Raises ConfigError."""
    if not isinstance(value, str):
        return value
    if not value.startswith("["):
        return [entry.strip() for entry in value.split(",")] if value else []
    try:
        return msgspec.json.decode(value, type=list[str])
    except msgspec.MsgspecError as error:
        raise ConfigError(f"plugin lora: option {name}: {error}.") from error
