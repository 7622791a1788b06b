"""Finds the part of a schema that cannot be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_SCHEMAS = (
    "additionalProperties",
    "items",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedProperties",
)
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_DEFINITIONS = ("$defs", "definitions", "$schema")
_TRIES = 300
"""Parts that are tried, of one schema."""


def locate(schema: dict[str, Any], message: str, error_of: Callable[[dict[str, Any]], str]) -> str:
    """JSON pointer of the innermost part that fails with `message` by itself. `error_of` compiles a
    schema; "": it can be compiled."""
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    pointer = "#"
    part = schema
    tries = 0
    while True:
        for where, child in _children(part):
            tries += 1
            if tries > _TRIES:
                return pointer
            if error_of({**shared, **child}) == message:
                pointer, part = pointer + where, child
                break
        else:
            return pointer


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, value in schema.items():
        if name in _MAPPINGS and isinstance(value, dict):
            yield from (
                (f"/{name}/{_escaped(key)}", item)
                for key, item in value.items()
                if isinstance(item, dict)
            )
        elif name in _LISTS and isinstance(value, list):
            yield from (
                (f"/{name}/{index}", item)
                for index, item in enumerate(value)
                if isinstance(item, dict)
            )
        elif name in _SCHEMAS and isinstance(value, dict):
            yield f"/{name}", value


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
