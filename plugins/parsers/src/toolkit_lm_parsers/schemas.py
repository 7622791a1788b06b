"""Looks up what a tool's JSON Schema says of an argument, through references and combinations.
Nothing is fetched, and cycles end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple
from urllib.parse import unquote

from toolkit_lm.errors import RequestError

from toolkit_lm_parsers.json_scanner import read_json

_MOST_PARTS = 256
"""Parts of a schema that are looked at for one argument."""
_NUMBERS = frozenset(("integer", "number"))
_NAMED = ("properties", "patternProperties", "dependentSchemas")
"""Keywords whose value maps arbitrary names (not keywords) to schemas."""
_VALUES = ("const", "enum", "default", "examples", "example")
"""Keywords whose values are data, not schemas."""
MOST_COPIED = 2_000_000
"""Characters, of all tools of a request together, of what is written anew for each parameter."""
OF_TEXT = 50
"""Characters that a text of a structure has around it."""
_MOVED = "__{}"
"""The name of a definition that a part is given."""


class Copies:
    """Counts what is written anew for each parameter of all tools of a request: it has a copy of
    all that its schema refers to."""

    def __init__(self) -> None:
        self.num_left = MOST_COPIED

    def charge(self, count: int) -> None:
        """Counts characters. Raises RequestError where they are too many."""
        self.num_left -= count
        if self.num_left < 0:
            raise RequestError(
                "tools: the schemas of the parameters say too much: written out for each "
                "parameter, what they refer to has more than "
                f"{MOST_COPIED} characters. Refer to smaller schemas, or send fewer tools.",
                "tools",
            )


class _Moved(NamedTuple):
    """A part whose references lead to definitions."""

    schema: Any
    references: tuple[str, ...]
    """References in the part, each once."""
    size: int
    """Characters of its JSON."""


class Schemas:
    """The schema of one function's arguments, to look things up in."""

    def __init__(self, root: Any, copies: Copies | None = None) -> None:
        """`copies`: counts what `alone` and `values_of` give, for several schemas; None: for this
        one."""
        self.root = root
        self._copies = copies or Copies()
        self._names: dict[str, str] = {}
        """Names of definitions in a self-contained schema, by reference."""
        self._definitions: dict[str, _Moved] = {}
        """Parts that references lead to, moved, by reference."""
        self._types: dict[int, frozenset[str]] = {}
        """Types of a list's values, by the list's id."""

    def parts(self, schema: Any, *names: str) -> Iterator[Mapping[str, Any]]:
        """A schema, and all that it refers to or is combined of, each once, by these keywords."""
        left = [schema]
        seen = set[int]()
        while left and len(seen) < _MOST_PARTS:
            subschema = left.pop()
            if not isinstance(subschema, Mapping) or id(subschema) in seen:
                continue
            seen.add(id(subschema))
            yield subschema
            left += [
                part
                for name in reversed(names)
                for part in reversed(_listed(subschema.get(name))[:_MOST_PARTS])
            ]
            if "$ref" in subschema:
                left.append(self.target(subschema["$ref"]))

    def target(self, reference: Any) -> Any:
        """The part that a reference within the schema leads to; None if it leads nowhere, or out of
        the schema."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self.root
        pointer = unquote(reference[1:])
        if pointer and not pointer.startswith("/"):
            return self._anchors.get(pointer)
        for step in pointer.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if (
                isinstance(found, list)
                and step.isascii()
                and step.isdigit()
                and int(step) < len(found)
            ):
                found = found[int(step)]
            elif isinstance(found, Mapping):
                found = found.get(step)
            else:
                return None
        return found

    @cached_property
    def _anchors(self) -> dict[str, Any]:
        """Definitions by their $anchor, the first one of each."""
        both = (
            _mapping(_mapping(self.root).get(name)).values() for name in ("definitions", "$defs")
        )
        named = [definition for definitions in both for definition in reversed([*definitions])]
        return {
            anchor: definition
            for definition in named
            if isinstance(anchor := _mapping(definition).get("$anchor"), str)
        }

    def kinds(self, schema: Any) -> frozenset[str] | None:
        """The types that a value may have; "number" comes with "integer". None: any."""
        return self._kinds(schema, [_MOST_PARTS], ()) or None

    def _kinds(
        self, schema: Any, left: list[int], within: tuple[int, ...]
    ) -> frozenset[str] | None:
        """`left`: parts that may still be looked at. `within`: the schemas that this one is a part
        of."""
        left[0] -= 1
        if not isinstance(schema, Mapping) or left[0] < 0:
            return None
        if id(schema) in within:
            # A circle adds no type.
            return frozenset()
        within = (*within, id(schema))
        found = _types(schema.get("type"))
        if (values := _values(schema)) is not None:
            found = _both(found, self._types_of_all(values))
        if "$ref" in schema:
            found = _both(found, self._kinds(self.target(schema["$ref"]), left, within))
        # One more than may be looked at shows that they are too many.
        for part in _listed(schema.get("allOf"))[: _MOST_PARTS + 1]:
            found = _both(found, self._kinds(part, left, within))
        for name in ("anyOf", "oneOf"):
            if options := _listed(schema.get(name))[: _MOST_PARTS + 1]:
                kinds = [self._kinds(option, left, within) for option in options]
                if None not in kinds:
                    found = _both(
                        found, frozenset[str]().union(*(kind for kind in kinds if kind is not None))
                    )
        if not found:
            if "properties" in schema:
                found = frozenset(("object",))
            elif "items" in schema:
                found = frozenset(("array",))
        return found | {"null"} if found is not None and schema.get("nullable") is True else found

    def _types_of_all(self, values: Sequence[Any]) -> frozenset[str]:
        """The types of listed values, which are looked at once."""
        if len(values) == 1:
            return _types_of(values[0])
        if id(values) not in self._types:
            self._types[id(values)] = frozenset(
                kind for value in values for kind in _types_of(value)
            )
        return self._types[id(values)]

    def keywords(self, schema: Any, *names: str) -> dict[str, Any]:
        """Values of some keywords, through references and `allOf`. If several parts have a keyword,
        the first part's value counts."""
        found: dict[str, Any] = {}
        for part in self.parts(schema, "allOf"):
            found = {**{name: part[name] for name in names if name in part}, **found}
        return found

    def values_of(self, keywords: Mapping[str, Any]) -> Sequence[Any]:
        """The values that `const` or `enum` lists, to be copied. Empty: they list none. Raises
        RequestError as Copies does."""
        found = _values(keywords) or ()
        self._copies.charge(sum(OF_TEXT + len(str(value)) for value in found))
        return found

    def values(self, schema: Any) -> list[Any]:
        """The values that a schema lists. Empty: it lists none."""
        return [
            value
            for part in self.parts(schema, "allOf", "anyOf", "oneOf")
            for value in _values(part) or ()
        ]

    def property(self, schema: Any, name: str) -> Any:
        """The schema of an object's property; None: nothing is said of it."""
        parts = list(self.parts(schema, "allOf", "anyOf", "oneOf"))
        found = [
            _mapping(part.get("properties"))[name]
            for part in parts
            if name in _mapping(part.get("properties"))
        ]
        if not found:
            others = (part.get("additionalProperties") for part in parts)
            found = [subschema for subschema in others if isinstance(subschema, Mapping)]
        return _any_of(found)

    def may_have(self, schema: Any, name: str) -> bool:
        """Whether an object has a property of a name, or its schema names none."""
        named = [
            part["properties"]
            for part in self.parts(schema, "allOf", "anyOf", "oneOf")
            if isinstance(part.get("properties"), Mapping)
        ]
        return not named or any(name in definition for definition in named)

    def items(self, schema: Any) -> Any:
        """The schema of a list's items; None: nothing is said of them."""
        items = [
            part["items"]
            for part in self.parts(schema, "allOf", "anyOf", "oneOf")
            if isinstance(part.get("items"), Mapping)
        ]
        return _any_of(items)

    def merged(self, schema: Any) -> dict[str, Any]:
        """A schema without references and `allOf`, as one mapping: of a keyword that several have,
        the first one's counts."""
        merged: dict[str, Any] = {}
        properties: dict[str, Any] = {}
        required: dict[str, None] = {}
        for part in self.parts(schema, "allOf"):
            properties = {**_mapping(part.get("properties")), **properties}
            required |= dict.fromkeys(
                name for name in _listed(part.get("required")) if isinstance(name, str)
            )
            merged = {**part, **merged}
        if "properties" in merged:
            merged["properties"] = properties
        if required:
            merged["required"] = [*required]
        if (kinds := self.kinds(schema)) and "type" in merged:
            merged["type"] = sorted(kinds - ({"integer"} if "number" in kinds else set()))
        return {name: value for name, value in merged.items() if name not in ("$ref", "allOf")}

    def alone(self, part: Any) -> Any:
        """A part as a schema of its own, with the definitions that it reaches. They are shared with
        other parts: leave them as they are.

        Raises RequestError as Copies does.
        """
        if not refers(part) or not isinstance(part, Mapping):
            return part
        moved = self._moved(part)
        reached = dict.fromkeys(moved.references)
        left = [*reached]
        while left:
            definition = self._definition(left.pop())
            self._copies.charge(definition.size)
            left += [reference for reference in definition.references if reference not in reached]
            reached |= dict.fromkeys(definition.references)
        definitions = {
            self._names[reference]: self._definition(reference).schema for reference in reached
        }
        return {**moved.schema, "$defs": definitions} if definitions else moved.schema

    def _definition(self, reference: str) -> _Moved:
        if reference not in self._definitions:
            self._definitions[reference] = self._moved(self.target(reference))
        return self._definitions[reference]

    def _moved(self, part: Any) -> _Moved:
        """A part whose references lead to definitions by `_names`. One that leads nowhere stays."""
        references: dict[str, None] = {}

        def moved(value: Any, *, are_names: bool = False) -> Any:
            if isinstance(value, list):
                return [moved(item) for item in value]
            if not isinstance(value, Mapping):
                return value
            if are_names:
                return {name: moved(item) for name, item in value.items()}
            # Its own definitions are reached by references.
            copy = {
                name: item if name in _VALUES else moved(item, are_names=name in _NAMED)
                for name, item in value.items()
                if name not in ("$defs", "definitions")
            }
            reference = value.get("$ref")
            if isinstance(reference, str) and self.target(reference) is not None:
                references[reference] = None
                copy["$ref"] = (
                    f"#/$defs/{self._names.setdefault(reference, _MOVED.format(len(self._names)))}"
                )
            return copy

        schema = moved(part)
        return _Moved(schema, (*references,), len(json.dumps(schema)))

    def definition(self, name: str) -> Any:
        """The whole schema, to be the definition of this name in another one."""
        return _moved(self.root, name)

    def argument(self, value: str, schema: Any) -> str:
        """The JSON of an argument that is written without quotes: a text where the schema says so,
        or nothing else."""
        kinds = self.kinds(schema)
        if kinds is None or kinds == {"string"}:
            return _dumps(value)
        plain = value.strip()
        parsed = read_json(plain)
        listed = self.values(schema)
        for text in (value, plain):
            if text in [value for value in listed if isinstance(value, str)]:
                return _dumps(text)
        if parsed is not None:
            read = json.loads(parsed)
            # The quotes of a quoted text belong to the text.
            if not isinstance(read, str) and not kinds.isdisjoint(_types_of(read)):
                return parsed
            if "string" not in kinds:
                return parsed
        return _dumps(value)


def _dumps(value: str) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _types(types: Any) -> frozenset[str] | None:
    names = (
        [types]
        if isinstance(types, str)
        else [name for name in _listed(types) if isinstance(name, str)]
    )
    found = frozenset(names) | (_NUMBERS if "number" in names else frozenset())
    return found or None


def _types_of(value: Any) -> frozenset[str]:
    """The types that a value is of."""
    match value:
        case bool():
            return frozenset(("boolean",))
        case int():
            return _NUMBERS
        case float():
            return _NUMBERS if value.is_integer() else frozenset(("number",))
        case str():
            return frozenset(("string",))
        case list():
            return frozenset(("array",))
        case None:
            return frozenset(("null",))
        case _:
            return frozenset(("object",))


def _values(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    return _listed(schema.get("enum")) or None


def _both(first: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if first is None or other is None:
        return other if first is None else first
    # Where they contradict each other no value is right: the first one's types are as good.
    return first & other or first or other


def _listed(value: Any) -> Sequence[Any]:
    """A list of a schema, that may be none."""
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """All mappings in a schema."""
    left = [value]
    while left:
        subschema = left.pop()
        if isinstance(subschema, Mapping):
            yield subschema
            left += subschema.values()
        elif isinstance(subschema, list):
            left += subschema


def refers(schema: Any) -> bool:
    """Whether there are references in a schema."""
    return any("$ref" in mapping for mapping in _mappings(schema))


def _moved(value: Any, definition: str) -> Any:
    """A schema whose references lead into a definition that is the whole schema."""
    if isinstance(value, list):
        return [_moved(item, definition) for item in value]
    if not isinstance(value, Mapping):
        return value
    moved = {
        name: item if name in _VALUES else _moved(item, definition) for name, item in value.items()
    }
    reference = value.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = f"#/$defs/{definition}{reference[1:]}"
    return moved


def _any_of(schemas: list[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The schema of what is of any of some; None of none."""
    if len(schemas) > 1:
        return {"anyOf": schemas}
    return schemas[0] if schemas else None
