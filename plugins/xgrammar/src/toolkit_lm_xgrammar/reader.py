"""Translates wishes into xgrammar's input. Imports neither xgrammar nor torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.checks import (
    MAX_SCHEMA,
    checked_schema,
    choices_of,
    schema_of,
    text_of,
)
from toolkit_lm_structured_output.contract import Reading, WishReader
from toolkit_lm_structured_output.finishing import types_of
from toolkit_lm_structured_output.wishes import Wish, read_json

_MOST_WHITESPACE = 20
"""Characters between the parts of a JSON document."""
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SCHEMAS = ("additionalProperties", "items", "additionalItems")
_HELD = {
    *_MAPPINGS,
    *_LISTS,
    *_SCHEMAS,
    *(
        "$ref",
        "$schema",
        "$id",
        "$comment",
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
    ),
    *(
        "type",
        "enum",
        "const",
        "required",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
    ),
    *(
        "minProperties",
        "maxProperties",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "format",
    ),
}
"""Keywords that xgrammar holds to, or that say nothing. It passes others over, and so an output
could be another than was asked for."""
_FORMATS = (
    "date",
    "time",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPES = {
    "string": ("minLength", "maxLength", "pattern", "format"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "additionalItems"),
    "object": (
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
    ),
    "number": _NUMBERS,
    "integer": _NUMBERS,
}
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""If a schema has one of these keywords, xgrammar ignores all its others."""
_SILENT = (
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$defs",
    "definitions",
)


class XGrammarReader(WishReader):
    compiler = "toolkit_lm_xgrammar.compiler:XGrammarCompiler"

    def read(self, wish: Wish) -> Reading:
        return Reading(json.dumps(_grammar(wish), ensure_ascii=False))


def _grammar(wish: Wish) -> dict[str, Any]:
    """A kind that XGrammarCompiler knows, with what it needs."""
    match wish.kind:
        case "json" | "json_object":
            if wish.whitespace_pattern is not None:
                raise RequestError(
                    f"{wish.param}: xgrammar takes no whitespace_pattern.", wish.param
                )
            return {
                "kind": "json",
                "schema": _schema(schema_of(wish), wish),
                "any_whitespace": wish.any_whitespace,
                "most": _MOST_WHITESPACE,
            }
        case "regex":
            return {"kind": "regex", "text": text_of(wish, "regular expression")}
        case "choice":
            return {
                "kind": "grammar",
                "text": f"root ::= {' | '.join(map(_literal, choices_of(wish)))}",
            }
        case "grammar":
            return {"kind": "grammar", "text": text_of(wish, "grammar")}
        case _:
            return {"kind": "structural_tag", "tag": _tag(wish)}


def _schema(schema: dict[str, Any] | None, wish: Wish) -> dict[str, Any]:
    assert schema is not None, "this kind has one"
    if not wish.lenient and (wrong := next(_not_held(schema), None)) is not None:
        raise RequestError(
            f"{wish.param}: the schema cannot be used: xgrammar does not hold to {wrong}.",
            wish.param,
        )
    return schema


def _not_held(schema: Any) -> Iterator[str]:
    """Parts of a schema that xgrammar would ignore, with their places."""
    left: list[tuple[Any, str]] = [(schema, "#")]
    while left:
        subschema, where = left.pop()
        if isinstance(subschema, bool):
            if not subschema and where.rpartition("/")[2] not in _SCHEMAS:
                yield f"false (at {where})"
            continue
        if not isinstance(subschema, Mapping):
            yield f"{subschema!r:.40} (at {where})"
            continue
        yield from (f"{name!r} (at {where})" for name in subschema if name not in _HELD)
        yield from (f"{conflict} (at {where})" for conflict in _conflicts(subschema))
        for name in _MAPPINGS:
            left += [
                (value, f"{where}/{name}/{key}")
                for key, value in _mapping(subschema.get(name)).items()
            ]
        for name in (*_LISTS, *_SCHEMAS):
            value = subschema.get(name)
            if isinstance(value, list) and name in _LISTS:
                left += [(part, f"{where}/{name}/{index}") for index, part in enumerate(value)]
            elif name in subschema and name in _SCHEMAS and not isinstance(value, list):
                left.append((value, f"{where}/{name}"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _conflicts(schema: Mapping[str, Any]) -> Iterator[str]:
    """Keywords that are held to alone, but not as they stand here."""
    kinds = schema.get("type")
    keywords = [name for name in schema if name not in _SILENT]
    alone = [name for name in keywords if name in _ALONE]
    if alone and len(keywords) > 1 + ("type" in keywords and alone[0] in ("enum", "const")):
        yield f"{alone[0]!r} beside {next(name for name in keywords if name != alone[0])!r}"
    if "oneOf" in schema:
        yield "'oneOf'"
    if isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1:
        yield "'allOf' of several"
    if isinstance(schema.get("$ref"), str) and not (
        schema["$ref"] == "#" or schema["$ref"].startswith("#/")
    ):
        yield f"'$ref' {schema['$ref']!r:.60}"
    if schema.get("format") is not None and schema["format"] not in _FORMATS:
        yield f"'format' {schema['format']!r:.40}"
    if ("pattern" in schema or "format" in schema) and (
        {"minLength", "maxLength"} & set(schema) or {"pattern", "format"} <= set(schema)
    ):
        yield "'pattern' or 'format' beside other limits of a text"
    if not set(schema.get("required", ())) <= set(_mapping(schema.get("properties"))):
        yield "'required' of properties that it does not name"
    if _mapping(schema.get("patternProperties")) and _mapping(schema.get("properties")):
        # A property that both are about would have to follow both.
        yield "'patternProperties' beside 'properties'"
    named = {kinds} if isinstance(kinds, str) else None
    if isinstance(kinds, list):
        named = {kind for kind in kinds if isinstance(kind, str)}
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if named is not None and not all(
        named.intersection(types_of(subschema))
        for subschema in (listed if isinstance(listed, list) else ())
    ):
        yield "values that are not of their 'type'"
    limits = [name for names in _OF_TYPES.values() for name in names if name in schema]
    if limits and not (
        isinstance(kinds, str) and all(name in _OF_TYPES.get(kinds, ()) for name in limits)
    ):
        yield f"{limits[0]!r} of any type but one"


def _schemas(tag_format: Any) -> Iterator[Any]:
    """The JSON schemas of a format."""
    left = [tag_format]
    while left:
        subschema = left.pop()
        if isinstance(subschema, list):
            left += subschema
        elif isinstance(subschema, Mapping):
            if subschema.get("type") == "json_schema":
                yield subschema.get("json_schema", {})
            else:
                left += subschema.values()


def _literal(text: str) -> str:
    return json.dumps(text)


def _tag(wish: Wish) -> dict[str, Any]:
    """A structural tag within its limits; xgrammar checks the rest."""
    tag_format = read_json(wish.value, wish.param, "the structural tag")
    if (
        not isinstance(tag_format, dict)
        or tag_format.get("type", "structural_tag") != "structural_tag"
    ):
        raise RequestError(
            f"{wish.param}: a structural tag has structures and triggers, or a format.", wish.param
        )
    checked_schema(tag_format, wish)
    if len(json.dumps(tag_format)) > MAX_SCHEMA:
        raise RequestError(
            f"{wish.param}: the structural tag has more than {MAX_SCHEMA} characters.", wish.param
        )
    if "format" in tag_format:
        for schema in _schemas(tag_format["format"]):
            checked_schema(schema, wish)
        return {"type": "structural_tag", "format": tag_format["format"]}
    structures = tag_format.get("structures")
    triggers = tag_format.get("triggers")
    if (
        not isinstance(structures, list)
        or not isinstance(triggers, list)
        or not structures
        or not triggers
    ):
        raise RequestError(
            f"{wish.param}: a structural tag needs triggers, and structures.", wish.param
        )
    tags = []
    for index, item in enumerate(structures):
        if (
            not isinstance(item, Mapping)
            or not isinstance(item.get("begin"), str)
            or not isinstance(item.get("end", ""), str)
        ):
            raise RequestError(
                f"{wish.param}: structure {index} must have a begin, a schema and an end.",
                wish.param,
            )
        if not any(
            isinstance(text, str) and text and item["begin"].startswith(text) for text in triggers
        ):
            raise RequestError(
                f"{wish.param}: structure {index} begins with none of the triggers.", wish.param
            )
        content = {
            "type": "json_schema",
            "json_schema": _schema(checked_schema(item.get("schema", {}), wish), wish),
        }
        tags.append(
            {"type": "tag", "begin": item["begin"], "content": content, "end": item.get("end", "")}
        )
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }
