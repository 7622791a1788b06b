"""Arguments in Gemma's form, as the `format` of structural tags: {key:value}, with texts between
marks of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from toolkit_lm_parsers.schemas import MOST_COPIED, OF_TEXT, Copies, Schemas
from toolkit_lm_parsers.structures import (
    ANY_TEXT,
    Structure,
    choice,
    json_schema,
    sequence,
    tag,
    text,
)

_MOST_DEPTH = 4
"""Levels of objects and lists that follow their schema. What is deeper has no values but texts,
numbers, true, false and null."""
_FREE_DEPTHS = (4, 3, 2)
"""Levels of what a schema leaves open: the most of which the grammar is small enough."""
_MOST_FORMATS = 2048
"""Most formats in the grammars of all functions together. Grammar compilers accept a bounded
number."""
_MOST_WORK = 16_384
"""Values and properties that are looked at for one function."""
_MOST_OPTIONS = 8
"""Levels, those of alternatives counted too, at which there are alternatives."""
_MOST_LENGTH = 1000
"""Characters of a text whose length is held to."""
_MOST_OPTIONAL = 12
"""Properties of an object that requires none, in their order: its grammar grows with the square.
More may come in any order, and twice."""
_LITERALS = ("integer", "number", "boolean", "null")
_TYPES = (*_LITERALS, "string", "array", "object")
_KEY: Structure = {"type": "regex", "pattern": "[A-Za-z_][A-Za-z0-9_]{0,63}"}


class _TooLargeError(Exception):
    pass


class GemmaArguments:
    """Grammar for the arguments of one function.

    It enforces types, properties, their order and which are required, `enum`, `const`, `anyOf`,
    `oneOf`, references within the schema, limits of numbers, and short limits of texts. It also
    enforces whether a list may be empty. All other keywords are ignored."""

    def __init__(
        self,
        quote: str,
        schema: Mapping[str, Any],
        num_functions: int = 1,
        copies: Copies | None = None,
    ) -> None:
        """`quote`: the mark around texts. `num_functions`: as many grammars are one. `copies`:
        counts all of them."""
        self._quote = quote
        self._most_formats = _MOST_FORMATS // max(num_functions, 1)
        self._free_depth = _FREE_DEPTHS[-1]
        self._num_left = _MOST_WORK
        self._open: dict[int, Structure] = {}
        """Structures for any value, by the number of levels."""
        self._copies = copies or Copies()
        self._schemas = Schemas(schema)
        self._schema = self._schemas.merged(schema)

    def structure(self) -> Structure:
        """With the braces around them. Raises RequestError as Copies does."""
        found = None
        for depth in _FREE_DEPTHS:
            self._free_depth = depth
            self._num_left = _MOST_WORK
            try:
                found = self._object(self._schema, 0)
            except _TooLargeError:
                continue
            if _num_formats(found, self._most_formats) <= self._most_formats:
                break
        most = MOST_COPIED // OF_TEXT
        self._copies.charge(OF_TEXT * (most + 1 if found is None else _num_formats(found, most)))
        assert found is not None, "what is too large is charged with more than there is"
        return found

    def _charge(self, count: int) -> None:
        """Counts what is to be looked at, before it is."""
        self._num_left -= count
        if self._num_left < 0:
            raise _TooLargeError

    def _value(self, schema: Any, depth: int) -> Structure:
        self._charge(1)
        schema = self._resolved(schema)
        if not isinstance(schema, Mapping):
            return self._free(self._free_depth if depth <= _MOST_DEPTH else 0)
        if schema.get("nullable") is True:
            value = self._value({**schema, "nullable": False}, depth)
            return choice(value, self._written(None))
        if "const" in schema:
            return self._written(schema["const"])
        if isinstance(values := schema.get("enum"), list) and values:
            self._charge(len(values))
            return choice(*map(self._written, values))
        for name in ("anyOf", "oneOf"):
            if isinstance(options := schema.get(name), list) and options:
                if depth > _MOST_OPTIONS:
                    return self._free(0)
                return choice(*(self._value(option, depth + 1) for option in options))
        kinds = schema.get("type")
        known = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind in _TYPES]
        if not known:
            implied = {"properties": "object", "items": "array"}
            known = [kind for name, kind in implied.items() if name in schema][:1]
        if not known or (depth > _MOST_DEPTH and not {"object", "array"}.isdisjoint(known)):
            return self._free(self._free_depth if depth <= _MOST_DEPTH else 0)
        return choice(*(self._of_type(kind, schema, depth) for kind in known))

    def _of_type(self, kind: str, schema: Mapping[str, Any], depth: int) -> Structure:
        match kind:
            case "string":
                return self._string(schema)
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(
                    self._value(schema.get("items"), depth + 1), is_empty=not schema.get("minItems")
                )
            case _:
                limits = (
                    "minimum",
                    "maximum",
                    "exclusiveMinimum",
                    "exclusiveMaximum",
                    "multipleOf",
                )
                return json_schema(
                    {"type": kind, **{name: schema[name] for name in limits if name in schema}}
                )

    def _string(self, schema: Mapping[str, Any]) -> Structure:
        pattern = schema.get("pattern")
        if not (isinstance(pattern, str) and pattern.startswith("^") and pattern.endswith("$")):
            pattern = self._of_length(schema)
        if pattern is not None:
            return sequence(
                text(self._quote), {"type": "regex", "pattern": pattern[1:-1]}, text(self._quote)
            )
        return tag(self._quote, ANY_TEXT, self._quote)

    def _of_length(self, schema: Mapping[str, Any]) -> str | None:
        """A pattern of texts of these lengths; None: of any. They have no character with which the
        mark around them begins."""
        least = schema.get("minLength", 0)
        most = schema.get("maxLength")
        if not (type(least) is type(most) is int and 0 <= least <= most <= _MOST_LENGTH):
            return None
        return f"^[^{self._quote[0]}]{{{least},{most}}}$"

    def _object(self, schema: Mapping[str, Any], depth: int) -> Structure:
        properties = _mapping(schema.get("properties"))
        if not properties:
            is_empty = "properties" in schema or (
                depth == 0 and schema.get("additionalProperties") is False
            )
            return text("{}") if is_empty else self._free_object(depth)
        required_names = schema.get("required")
        required = (
            frozenset(name for name in required_names if isinstance(name, str))
            if isinstance(required_names, list)
            else frozenset[str]()
        )
        items = [
            (f"{self._key(name)}:", self._value(subschema, depth + 1), name in required)
            for name, subschema in properties.items()
        ]
        first = [(key, value) for key, value, is_required in items if is_required]
        later = [(key, value) for key, value, is_required in items if not is_required]
        rest = [choice(sequence(text(f",{key}"), value), text("")) for key, value in later]
        if first:
            parts = [
                part
                for place, (key, value) in enumerate(first)
                for part in (text(f"{',' if place else '{'}{key}"), value)
            ]
            return sequence(*parts, *rest, text("}"))
        if len(later) > _MOST_OPTIONAL:
            return sequence(
                text("{"),
                _separated(*(tag(key, value, "") for key, value in later), at_least_one=False),
                text("}"),
            )
        beginnings = [
            sequence(text(key), value, *rest[place + 1 :])
            for place, (key, value) in enumerate(later)
        ]
        return sequence(text("{"), choice(*beginnings, text("")), text("}"))

    def _array(self, item: Structure, *, is_empty: bool) -> Structure:
        return sequence(
            text("["), _separated(tag("", item, ""), at_least_one=not is_empty), text("]")
        )

    def _free(self, depth: int) -> Structure:
        """Any value. It is the same each time."""
        if depth not in self._open:
            self._open[depth] = self._made_free(depth)
        return self._open[depth]

    def _made_free(self, depth: int) -> Structure:
        plain = [
            self._string({}),
            *(json_schema({"type": kind}) for kind in ("number", "boolean", "null")),
        ]
        if not depth:
            return choice(*plain)
        inner = self._free(depth - 1)
        return choice(*plain, self._array(inner, is_empty=True), self._pairs(inner))

    def _free_object(self, depth: int) -> Structure:
        return self._pairs(self._free(self._free_depth - 1 if depth <= _MOST_DEPTH else 0))

    def _pairs(self, value: Structure) -> Structure:
        return sequence(
            text("{"),
            _separated(tag("", sequence(_KEY, text(":"), value), ""), at_least_one=False),
            text("}"),
        )

    def _written(self, value: Any) -> Structure:
        """A value of its own."""
        return text(self._literal(value))

    def _literal(self, value: Any) -> str:
        match value:
            case str():
                return f"{self._quote}{value}{self._quote}"
            case dict():
                return (
                    "{"
                    + ",".join(
                        f"{self._key(name)}:{self._literal(item)}" for name, item in value.items()
                    )
                    + "}"
                )
            case list():
                return f"[{','.join(map(self._literal, value))}]"
            case _:
                return json.dumps(value)

    def _key(self, name: str) -> str:
        return (
            name
            if name.replace("_", "a").replace("-", "a").isalnum()
            else f"{self._quote}{name}{self._quote}"
        )

    def _resolved(self, schema: Any) -> Any:
        """A schema without references and `allOf`. One that leads nowhere leaves the value open."""
        if not isinstance(schema, Mapping):
            return None
        if not {"$ref", "allOf"} & schema.keys():
            return schema
        merged = self._schemas.merged(schema)
        self._charge(len(_mapping(merged.get("properties"))))
        return merged or None


def _separated(*tags: Structure, at_least_one: bool) -> Structure:
    return {
        "type": "tags_with_separator",
        "tags": [*tags],
        "separator": ",",
        "at_least_one": at_least_one,
        "stop_after_first": False,
    }


def _num_formats(found: Structure, most: int) -> int:
    """How many formats are in a structure, each counted as often as it is written, and for several
    where its text is long.

    More than `most` are not counted to their end.
    """
    left = [found]
    count = 0
    while left and count <= most:
        subschema = left.pop()
        count += (
            1 + sum(len(subschema.get(name, "")) for name in ("begin", "value", "end")) // OF_TEXT
        )
        left += [*subschema.get("elements", ()), *subschema.get("tags", ())]
        left += [subschema["content"]] if isinstance(subschema.get("content"), dict) else []
    return count


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
