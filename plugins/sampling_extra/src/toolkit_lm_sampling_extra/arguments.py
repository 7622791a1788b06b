"""Checks of what requests give to a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.errors import nearest


def only(arguments: Mapping[str, Any], name: str) -> Any:
    """The value of the one argument that there is. Raises ValueError where it is missing, or others are there."""
    for other in arguments:
        if other != name:
            raise ValueError(f"there is no argument {other!r}. {nearest(str(other), [name])}")
    if name not in arguments:
        raise ValueError(f"it needs the argument {name!r}")
    return arguments[name]
