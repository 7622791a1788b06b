"""The options of plugins: an entry module may define `Options`, a msgspec Struct, a dataclass or a pydantic model."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import msgspec

from toolkit_lm.errors import ConfigError, PluginError, nearest
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


def check_options_class(kind: Any) -> None:
    """Raises PluginError for a class that options cannot be made of."""
    if kind is None or hasattr(kind, "model_validate") or dataclasses.is_dataclass(kind):
        return
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        raise PluginError("Options must be a msgspec Struct, a dataclass or a pydantic model, and it is none of them")


def option_fields(kind: type[Any]) -> dict[str, str]:
    """The options that a plugin has: each with its type, its default, and as help the text that stands below it in the source."""
    helps = _texts_below(kind)
    options = inspect.signature(kind, eval_str=True).parameters.values()
    return {one.name: f"{str(one).partition(': ')[2]}{helps.get(one.name, '')}" for one in options}


def _texts_below(kind: type[Any]) -> dict[str, str]:
    try:
        definition: Any = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    fields = [(one, text) for one, text in pairwise(definition.body) if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr)]
    return {ast.unparse(field.target): f". {' '.join(ast.literal_eval(text.value).split())}" for field, text in fields}
