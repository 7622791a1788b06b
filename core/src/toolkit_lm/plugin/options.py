"""The options of plugins: an entry module may define `Options`, a msgspec Struct, a dataclass or a pydantic model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec

from toolkit_lm.errors import ConfigError, PluginError, nearest
from toolkit_lm.plugin.info import PluginInfo


def make_options(info: PluginInfo, kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a plugin's `Options`. Raises ConfigError for an unknown key or a wrong value."""
    known = list(inspect.signature(kind).parameters)
    for key in values:
        if key not in known:
            raise ConfigError(f"{info} has no option {key!r}. {nearest(key, known)}")
    try:
        if hasattr(kind, "model_validate"):
            return kind.model_validate(dict(values))
        return msgspec.convert(dict(values), kind, strict=False)
    except ValueError as error:
        raise ConfigError(f"{info}: wrong options {dict(values)!r}: {error}") from error


def check_options_class(kind: Any) -> None:
    """Raises PluginError for a class that options cannot be made of."""
    if kind is None or hasattr(kind, "model_validate") or dataclasses.is_dataclass(kind):
        return
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise PluginError("Options must be a msgspec Struct, a dataclass or a pydantic model, and it is none of them")
