"""What a request writes, in its several forms, as one wish."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from toolkit_lm.errors import RequestError, nearest

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_FORMATS = {
    "text": (),
    "json_object": ("schema", "value"),
    "json_schema": ("json_schema", "schema"),
    "structural_tag": None,
}
"""Types of response_format, each with the names that it may have beside its type. None: whoever
reads the tag checks them."""
_SCHEMA_NAMES = ("name", "description", "schema", "strict")
OTHER_NAMES = {"grammar": "grammar", "ebnf": "grammar", "json_schema": "json", "regex": "regex"}
"""Parameters that llama.cpp and SGLang have for it, and the kind of each."""
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
    old = {
        name.removeprefix("guided_"): value
        for name, value in given.items()
        if name.startswith("guided_")
    }
    others = [
        _of_structured_outputs({kind: given[name]}, name)
        for name, kind in OTHER_NAMES.items()
        if given.get(name) not in (None, "")
    ]
    wishes = [
        wish
        for wish in (
            *others,
            _of_structured_outputs(given["structured_outputs"], "structured_outputs")
            if "structured_outputs" in given
            else None,
            _of_response_format(given["response_format"]) if "response_format" in given else None,
            _of_structured_outputs(old, next(name for name in given if name.startswith("guided_")))
            if old
            else None,
        )
        if wish is not None
    ]
    if len(wishes) > 1:
        one = wishes[0].param
        other = wishes[1].param
        raise RequestError(
            f"Cannot specify both {one} and {other}: each says what the output is to be. Give "
            "one of them.",
            other,
        )
    return wishes[0] if wishes else None


def _of_structured_outputs(given: Mapping[str, Any], param: str) -> Wish | None:
    known = (*KINDS, *_OPTIONS)
    kinds: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known and name.removeprefix("_") not in _NEUTRAL:
            raise RequestError(
                f"structured_outputs has no field {str(name)[:50]!r}. "
                f"{nearest(str(name)[:50], known)}",
                param,
            )
        # There is a schema false.
        if value is not None and (value is not False or name == "json"):
            (kinds if name in KINDS else options)[name] = value
    if not kinds:
        if given and not options:
            return None
        raise RequestError(f"structured_outputs must have one of {', '.join(KINDS)}.", param)
    if len(kinds) > 1:
        raise RequestError(
            f"structured_outputs must have one of {', '.join(KINDS)}: there are "
            f"{' and '.join(kinds)}.",
            param,
        )
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
    param = "response_format"
    kind = given.get("type")
    if kind not in _FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMATS)}, not {str(kind)[:50]!r}.",
            param,
        )
    if kind == "structural_tag":
        return Wish(param, "structural_tag", given)
    known = _FORMATS[kind] or ()
    _check_names(given, ("type", *known), param)
    if kind == "json_schema":
        told = given.get("json_schema") or (
            {"schema": given["schema"]} if given.get("schema") is not None else None
        )
        if not isinstance(told, dict):
            raise RequestError(
                'response_format.json_schema must be provided with this type: {"name": ..., '
                '"schema": {...}}.',
                param,
            )
        _check_names(told, _SCHEMA_NAMES, "response_format.json_schema")
        return Wish(
            param,
            "json",
            _schema(told.get("schema", {}), "response_format.json_schema.schema"),
            lenient=told.get("strict") is False,
        )
    schemas = [(name, given[name]) for name in known if given.get(name) is not None]
    if len(schemas) > 1:
        raise RequestError(
            "response_format has two schemas, schema and value: give one of them.", param
        )
    for name, value in schemas:
        return Wish(param, "json", _schema(value, f"response_format.{name}"))
    return Wish(param, "json_object", True) if kind == "json_object" else None


def _check_names(given: Mapping[str, Any], known: Sequence[str], inside: str) -> None:
    """Raises RequestError for a name that nothing would read."""
    for name, value in given.items():
        if name not in known and value is not None:
            told = str(name)[:50]
            raise RequestError(
                f"{inside} has no field {told!r}. {nearest(told, known)}", "response_format"
            )


def _schema(value: Any, what: str) -> Any:
    if not isinstance(value, dict | bool):
        raise RequestError(f"{what} must be a JSON Schema.", "response_format")
    return value


def read_json(value: Any, param: str, what: str) -> Any:
    """A value that may be the text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{what} is not JSON: {error}.", param) from None
