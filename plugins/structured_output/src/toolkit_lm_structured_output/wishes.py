"""Reads the several forms of structured-output parameters into one wish."""

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
"""Names that a response_format may have in addition to "type", by its type. None: the tag's reader
checks them."""
_SCHEMA_NAMES = ("name", "description", "schema", "strict")
OTHER_NAMES = {"grammar": "grammar", "ebnf": "grammar", "json_schema": "json", "regex": "regex"}
"""Parameters that llama.cpp and SGLang have for it, and the kind of each."""
_NEUTRAL = ("backend", "backend_was_auto", "disable_fallback")
"""Parameters of vLLM that choose how an output is made, not its form."""


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
    """Leaves out rules that the grammar cannot enforce, instead of refusing them."""


def wish_of(params: Mapping[str, Any]) -> Wish | None:
    """The one that a request's parameters ask for. Raises RequestError, naming the parameter."""
    old = {
        name.removeprefix("guided_"): value
        for name, value in params.items()
        if name.startswith("guided_")
    }
    others = [
        _from_structured_outputs({kind: params[name]}, name)
        for name, kind in OTHER_NAMES.items()
        if params.get(name) not in (None, "")
    ]
    wishes = [
        wish
        for wish in (
            *others,
            _from_structured_outputs(params["structured_outputs"], "structured_outputs")
            if "structured_outputs" in params
            else None,
            _from_response_format(params["response_format"])
            if "response_format" in params
            else None,
            _from_structured_outputs(
                old, next(name for name in params if name.startswith("guided_"))
            )
            if old
            else None,
        )
        if wish is not None
    ]
    if len(wishes) > 1:
        param = wishes[0].param
        other = wishes[1].param
        raise RequestError(
            f"Cannot specify both {param} and {other}: each says what the output is to be. Give "
            "one of them.",
            other,
        )
    return wishes[0] if wishes else None


def _from_structured_outputs(params: Mapping[str, Any], param: str) -> Wish | None:
    known = (*KINDS, *_OPTIONS)
    kinds: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for name, value in params.items():
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
        if params and not options:
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


def _from_response_format(params: Mapping[str, Any]) -> Wish | None:
    param = "response_format"
    kind = params.get("type")
    if kind not in _FORMATS:
        raise RequestError(
            f"response_format.type must be one of {', '.join(_FORMATS)}, not {str(kind)[:50]!r}.",
            param,
        )
    if kind == "structural_tag":
        return Wish(param, "structural_tag", params)
    known = _FORMATS[kind] or ()
    _check_names(params, ("type", *known), param)
    if kind == "json_schema":
        schema = params.get("json_schema") or (
            {"schema": params["schema"]} if params.get("schema") is not None else None
        )
        if not isinstance(schema, dict):
            raise RequestError(
                'response_format.json_schema must be provided with this type: {"name": ..., '
                '"schema": {...}}.',
                param,
            )
        _check_names(schema, _SCHEMA_NAMES, "response_format.json_schema")
        return Wish(
            param,
            "json",
            _schema(schema.get("schema", {}), "response_format.json_schema.schema"),
            additional_properties=schema.get("strict") is not True,
            lenient=schema.get("strict") is False,
        )
    schemas = [(name, params[name]) for name in known if params.get(name) is not None]
    if len(schemas) > 1:
        raise RequestError(
            "response_format has two schemas, schema and value: give one of them.", param
        )
    for name, value in schemas:
        return Wish(param, "json", _schema(value, f"response_format.{name}"))
    return Wish(param, "json_object", True) if kind == "json_object" else None


def _check_names(fields: Mapping[str, Any], known: Sequence[str], inside: str) -> None:
    """Raises RequestError for a name that nothing would read."""
    for name, value in fields.items():
        if name not in known and value is not None:
            shown = str(name)[:50]
            raise RequestError(
                f"{inside} has no field {shown!r}. {nearest(shown, known)}", "response_format"
            )


def _schema(value: Any, subject: str) -> Any:
    if not isinstance(value, dict | bool):
        raise RequestError(f"{subject} must be a JSON Schema.", "response_format")
    return value


def read_json(value: Any, param: str, subject: str) -> Any:
    """A value that may be the text of JSON."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{subject} is not JSON: {error}.", param) from None
