"""What a request writes, in its several forms, as one wish."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from toolkit_lm.errors import RequestError, nearest

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
_NEUTRAL = ("backend", "backend_was_auto", "disable_fallback")
"""Of vLLM: how the output comes to be, not what it is."""


class Wish(NamedTuple):
    """One kind of structure, and what it is."""

    param: str
    """The field that asks, for errors."""
    kind: str
    value: Any
    whitespace_pattern: str | None = None
    """None: at most one space, or a new line with its indentation."""
    any_whitespace: bool = True
    additional_properties: bool = True
    lenient: bool = False
    """What the grammar cannot hold to is left out, instead of being refused."""


def wish_of(given: Mapping[str, Any]) -> Wish | None:
    """The one that a request's parameters ask for. Raises RequestError, naming the parameter."""
    old = {name.removeprefix("guided_"): value for name, value in given.items() if name.startswith("guided_")}
    wishes = [
        wish
        for wish in (
            _of_structured_outputs(given["structured_outputs"], "structured_outputs") if "structured_outputs" in given else None,
            _of_response_format(given["response_format"]) if "response_format" in given else None,
            _of_structured_outputs(old, next(name for name in given if name.startswith("guided_"))) if old else None,
        )
        if wish is not None
    ]
    if len(wishes) > 1:
        one, other = wishes[0].param, wishes[1].param
        raise RequestError(f"Cannot specify both {one} and {other}: each says what the output is to be. Give one of them.", other)
    return wishes[0] if wishes else None


def _of_structured_outputs(given: Mapping[str, Any], param: str) -> Wish | None:
    known = (*KINDS, *_OPTIONS)
    kinds: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known and name.removeprefix("_") not in _NEUTRAL:
            raise RequestError(f"structured_outputs has no field {str(name)[:50]!r}. {nearest(str(name)[:50], known)}", param)
        # There is a schema false.
        if value is not None and (value is not False or name == "json"):
            (kinds if name in KINDS else options)[name] = value
    if not kinds:
        if given and not options:
            return None
        raise RequestError(f"structured_outputs must have one of {', '.join(KINDS)}.", param)
    if len(kinds) > 1:
        raise RequestError(f"structured_outputs must have one of {', '.join(KINDS)}: there are {' and '.join(kinds)}.", param)
    [(kind, value)] = kinds.items()
    pattern = options.get("whitespace_pattern")
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError("structured_outputs.whitespace_pattern must be a text.", param)
    return Wish(
        param,
        kind,
        value,
        whitespace_pattern=pattern,
        any_whitespace=not options.get("disable_any_whitespace"),
        additional_properties=not options.get("disable_additional_properties"),
    )


def _of_response_format(given: Mapping[str, Any]) -> Wish | None:
    param, kind = "response_format", given.get("type")
    if kind not in _FORMATS:
        raise RequestError(f"response_format.type must be one of {', '.join(_FORMATS)}, not {str(kind)[:50]!r}.", param)
    if kind == "json_schema":
        told = given.get("json_schema")
        if not isinstance(told, dict):
            raise RequestError('response_format.json_schema must be provided with this type: {"name": ..., "schema": {...}}.', param)
        schema = told.get("schema", {})
        if not isinstance(schema, dict | bool):
            raise RequestError("response_format.json_schema.schema must be a JSON Schema.", param)
        return Wish(param, "json", schema, lenient=told.get("strict") is False)
    if kind == "structural_tag":
        return Wish(param, "structural_tag", given)
    return Wish(param, "json_object", True) if kind == "json_object" else None


def read_json(value: Any, param: str, what: str) -> Any:
    """A value that may be the text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not JSON: {error}.", param) from None
