"""Options of plugins. An entry module may define `Options`: a msgspec Struct, a dataclass or a
pydantic model."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import msgspec
import msgspec.inspect

from toolkit_lm.errors import ConfigError, PluginError, in_plain_words, nearest
from toolkit_lm.plugin.boundary import place_of, reason
from toolkit_lm.plugin.info import PluginInfo


def make_options(info: PluginInfo, kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Makes an instance of a plugin's `Options`. Raises ConfigError for an unknown key or a wrong
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
        wrong = in_plain_words(error, f"{info}: option ", dict(values))
        if hasattr(error, "errors"):
            # pydantic's own text has types and an address of its documentation.
            [first, *_] = error.errors()
            wrong = f"{info}: option {'.'.join(map(str, first['loc']))}: {first['msg']}."
        raise ConfigError(f"{wrong} Given: {dict(values)!r}.") from None


def check_options_class(kind: Any) -> None:
    """Raises PluginError for a class that cannot hold options, or with annotations that cannot be
    resolved."""
    if kind is None:
        return
    if not (
        hasattr(kind, "model_validate")
        or dataclasses.is_dataclass(kind)
        or (isinstance(kind, type) and issubclass(kind, msgspec.Struct))
    ):
        raise PluginError(
            "Options must be a msgspec Struct, a dataclass or a pydantic model, and it is none "
            "of them"
        )
    try:
        _resolve(kind)
    except Exception as error:
        raise PluginError(f"Options ({place_of(kind)}) cannot be made: {reason(error)}") from error


@functools.cache
def _resolve(kind: type[Any]) -> None:
    """Raises where annotations cannot be resolved. Looks once at a class for all engines of a
    process."""
    inspect.signature(kind, eval_str=True)
    if not hasattr(kind, "model_validate"):
        msgspec.inspect.type_info(kind)
