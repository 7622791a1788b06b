"""The options of plugins: an entry module may define `Options`, a msgspec Struct, a dataclass or a pydantic model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from toolkit_lm.errors import ConfigError, nearest
from toolkit_lm.plugin.info import PluginInfo


def make_options(info: PluginInfo, kind: type[Any], values: Mapping[str, Any]) -> Any:
    """An instance of a plugin's `Options`. Raises ConfigError for an unknown key or a wrong value."""
    known = option_fields(kind)
    for key in values:
        if key not in known:
            raise ConfigError(f"{info} has no option {key!r}. {nearest(key, known)}")
    try:
        if hasattr(kind, "model_validate"):
            return kind.model_validate(dict(values))
        return msgspec.convert(dict(values), kind, strict=False)
    except ValueError as error:
        raise ConfigError(f"{info}: wrong options {dict(values)!r}: {error}") from error


def option_fields(kind: type[Any]) -> dict[str, str]:
    """The options that a plugin has, each with its type as text."""
    if hasattr(kind, "model_fields"):
        return {name: _type_name(one.annotation) for name, one in kind.model_fields.items()}
    if dataclasses.is_dataclass(kind):
        return {one.name: _type_name(one.type) for one in dataclasses.fields(kind)}
    return {one.encode_name: _type_name(one.type) for one in msgspec.structs.fields(kind)}


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
