"""Entries of this repository's distributions, for errors about something that is not installed.

shipped.json, in this folder, has them as data: {noun of a registry: {key: distribution}}. `python
docs/generate_shipped.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Container
from functools import cache
from importlib import metadata
from pathlib import Path

PARAMETER = "sampling parameter"
"""The noun of parameters of logits processors."""


def way_to_get(noun: str, key: str) -> str:
    """Sentence on how to install the entry of `key`. Empty if it is unknown, or installed
    already."""
    keys = _table().get(noun, {})
    # One command of a group is enough.
    distribution = keys.get(key) or next(
        (provider for name, provider in keys.items() if name.startswith(f"{key} ")), None
    )
    if distribution is None or is_installed(distribution):
        return ""
    return f"It comes with {distribution}: pip install {distribution}."


def parameter_source(name: str) -> str:
    """Sentence on which distribution brings an unknown sampling parameter. Empty if none does."""
    known = _table()[PARAMETER]
    family = name.partition("_")[0] + "_"
    alike = [name for name in known if name.startswith(family)]
    if name not in known and len(alike) > 1:
        # A parameter of a family of its plugin's: another spelling, or another version's.
        name = alike[0]
    distribution = known.get(name)
    return way_to_get(PARAMETER, name) or (
        f"It comes with {distribution}." if distribution is not None else ""
    )


def not_installed(noun: str, registered: Container[str]) -> str:
    """Sentence on further entries of a kind, and how to install them. Empty if all are
    installed."""
    absent = [
        (key, package)
        for key, package in _table().get(noun, {}).items()
        if key not in registered and not is_installed(package)
    ]
    return (
        f"Not installed: {', '.join(f'{key} (pip install {package})' for key, package in absent)}."
        if absent
        else ""
    )


def is_installed(distribution: str) -> bool:
    """Whether this environment has a distribution, loaded or not."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


@cache
def _table() -> dict[str, dict[str, str]]:
    read: dict[str, dict[str, str]] = json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
    return read
