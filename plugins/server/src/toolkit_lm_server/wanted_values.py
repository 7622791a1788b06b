"""Plain words for the values that a request's field takes, in place of pydantic's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of at most 64 bits",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "text",
    "string_unicode": "text without lone surrogates",
}
"""Words for the values of a field, by pydantic's type of error."""
_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}
"""Words for a bound and its key in the error's context, by pydantic's error type."""
_SIZES = {
    "string_too_short": ("at least", "min_length", "characters"),
    "string_too_long": ("at most", "max_length", "characters"),
    "too_short": ("at least", "min_length", "items"),
    "too_long": ("at most", "max_length", "items"),
}
"""Words for a bound of a length, its key in the error's context, and the counted thing, by
pydantic's error type."""


def wanted(problems: Sequence[Mapping[str, Any]]) -> str | None:
    """Words for the values that a field takes, such as "a whole number or null".

    `problems`: pydantic's errors about one value, one for each member of a union. None where one of
    them has words of its own.
    """
    if any("UploadFile" in problem["msg"] for problem in problems):
        return "a file"
    found = [words_of(problem["type"], problem.get("ctx") or {}) for problem in problems]
    words = dict.fromkeys(value for value in found if value is not None)
    return " or ".join(words) if None not in found else None


def words_of(kind: str, context: Mapping[str, Any]) -> str | None:
    """Words for the values that are right where pydantic reports an error of this type. None where
    it has words of its own."""
    if kind in _BOUNDS:
        word, key = _BOUNDS[kind]
        return f"{word} {context[key]}"
    if kind in _SIZES:
        word, key, counted = _SIZES[kind]
        return f"{word} {context[key]} {counted} long"
    return str(context["expected"]) if kind in ("literal_error", "enum") else _KINDS.get(kind)
