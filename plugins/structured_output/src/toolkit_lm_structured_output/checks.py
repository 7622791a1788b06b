"""The limits of what requests ask for, whatever compiles it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from toolkit_lm.errors import RequestError

from toolkit_lm_structured_output.finishing import dead_end
from toolkit_lm_structured_output.wishes import Wish, read_json

MAX_SCHEMA = 256 * 1024
"""Characters of a schema, or of all choices together."""
MAX_TEXT = 32 * 1024
"""Characters of a regular expression or a grammar."""
MAX_DEPTH = 64
"""Deepest nesting of objects and lists in a schema."""
MAX_CHOICES = 5_000
MAX_TAGS = 64
_DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are data."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values have schemas by name."""
_COMBINED = ("allOf", "anyOf", "oneOf")


def schema_of(wish: Wish) -> dict[str, Any] | None:
    """The schema of a wish for JSON; None for others. Raises RequestError."""
    if wish.kind == "json_object":
        return {"type": "object"}
    return checked_schema(wish.value, wish) if wish.kind == "json" else None


def checked_schema(value: Any, wish: Wish) -> dict[str, Any]:
    """A schema within its limits, as a mapping. Raises RequestError, also for one of which no
    document can be finished."""
    schema = read_json(value, wish.param, "the schema")
    if not isinstance(schema, dict | bool):
        raise RequestError(
            f"{wish.param}: a JSON Schema is a mapping, not a {type(schema).__name__}.", wish.param
        )
    for _, depth, where in _parts(schema):
        if depth > MAX_DEPTH:
            raise RequestError(
                f"{wish.param}: the schema is nested more than {MAX_DEPTH} deep at {where[:200]}.",
                wish.param,
            )
    try:
        length = len(json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise RequestError(f"{wish.param}: the schema is not JSON: {error}.", wish.param) from None
    if length > MAX_SCHEMA:
        raise RequestError(
            f"{wish.param}: the schema has {length} characters; at most {MAX_SCHEMA} are allowed.",
            wish.param,
        )
    if (found := dead_end(schema)) is not None:
        raise RequestError(
            f"{wish.param}: the schema cannot be used: {found.reason} (at {found.where[:200]}).",
            wish.param,
        )
    if isinstance(schema, bool):
        return {}
    # x-guidance is an option of llguidance: a request may not set it, only this plugin.
    schema = {name: value for name, value in schema.items() if name != "x-guidance"}
    return schema if wish.additional_properties else _closed(schema)


def _parts(schema: Any) -> Iterator[tuple[Any, int, str]]:
    """Everything in a schema, with its depth and JSON pointer."""
    left = [(schema, 0, "#")]
    while left:
        subschema, depth, where = left.pop()
        yield subschema, depth, where
        if depth > MAX_DEPTH:
            continue
        if isinstance(subschema, dict):
            left += [(value, depth + 1, f"{where}/{name}") for name, value in subschema.items()]
        elif isinstance(subschema, list):
            left += [
                (value, depth + 1, f"{where}/{index}") for index, value in enumerate(subschema)
            ]


def _closed(schema: Any, *, is_open: bool = False) -> Any:
    """The schema whose objects have no properties but those that it names.

    `is_open`: one of several parts of an object, which has the properties of the others, too.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: schema[name] for name in _COMBINED if isinstance(schema.get(name), list)}
    num_parts = len(parts.get("allOf", ())) + sum(
        name in schema for name in ("properties", "$ref", "anyOf", "oneOf")
    )
    are_open = is_open or num_parts > 1
    closed: dict[str, Any] = {}
    for name, value in schema.items():
        if name in _DATA:
            closed[name] = value
        elif name in _NAMED and isinstance(value, dict):
            closed[name] = {key: _closed(part) for key, part in value.items()}
        elif name in parts:
            closed[name] = [_closed(part, is_open=are_open) for part in value]
        else:
            closed[name] = _closed(value)
    names_some = any(
        isinstance(schema.get(name), dict) for name in ("properties", "patternProperties")
    )
    if names_some and not are_open:
        closed.setdefault("additionalProperties", False)
    return closed


def text_of(wish: Wish, subject: str) -> str:
    """The text that a wish has, within its limits. Raises RequestError, which calls it
    `subject`."""
    text = wish.value
    if not isinstance(text, str) or not text:
        raise RequestError(
            f"{wish.param}: a {subject} must be a text, and not an empty one.", wish.param
        )
    if len(text) > MAX_TEXT:
        raise RequestError(
            f"{wish.param}: the {subject} has {len(text)} characters; at most {MAX_TEXT} are "
            "allowed.",
            wish.param,
        )
    return text


def choices_of(wish: Wish) -> list[str]:
    """Each choice once. Raises RequestError."""
    choices = wish.value
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(text, str) for text in choices)
    ):
        raise RequestError(
            f"{wish.param}: choice must be a list of texts, at least one.", wish.param
        )
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_SCHEMA:
        most = f"at most {MAX_CHOICES} of {MAX_SCHEMA} characters together"
        raise RequestError(
            f"{wish.param}: there are {len(choices)} choices; {most} are allowed.", wish.param
        )
    return list(dict.fromkeys(choices))
