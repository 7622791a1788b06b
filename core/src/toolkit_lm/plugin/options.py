"""The options of plugins: an entry module may define `Options`, a msgspec Struct, a dataclass or a
pydantic model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import msgspec.inspect

from toolkit_lm.errors import ConfigError, PluginError, nearest
from toolkit_lm.plugin.boundary import place_of, reason
from toolkit_lm.plugin.info import PluginInfo


def make_options(info: PluginInfo, kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a plugin's `Options`. Raises ConfigError for an unknown key or a wrong
    value."""
    known = list(inspect.signature(kind).parameters)
    for key in values:
        if key not in known:
            raise ConfigError(f"{info} has no option {key!r}. {nearest(key, known)}")
    try:
        with info.boundary("making Options", passes=ValueError, target=kind):
            if hasattr(kind, "model_validate"):
                return kind.model_validate(dict(values))
            return msgspec.convert(dict(values), kind, strict=False)
    except ValueError as error:
        raise ConfigError(f"{info}: wrong options {dict(values)!r}: {error}") from error


def check_options_class(kind: Any) -> None:
    """Raises PluginError for a class that options cannot be made of, or with annotations that name
    nothing."""
    if kind is None:
        return
    is_pydantic = hasattr(kind, "model_validate")
    if not (
        is_pydantic
        or dataclasses.is_dataclass(kind)
        or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    ):
        raise PluginError(
            "Options must be a msgspec Struct, a dataclass or a pydantic model, and it is none "
            "of them"
        )
    try:
        inspect.signature(kind, eval_str=True)
        if not is_pydantic:
            msgspec.inspect.type_info(kind)
    except Exception as error:
        raise PluginError(f"Options ({place_of(kind)}) cannot be made: {reason(error)}") from error
