"""Structures: what an answer must be, as the `format` of structural tags."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from toolkit_lm.errors import RequestError

from toolkit_lm_parsers.escaped_grammars import escaped

Structure = dict[str, Any]
ANY_TEXT: Structure = {"type": "any_text"}
DIGITS: Structure = {"type": "regex", "pattern": "[0-9]+"}
GRAMMAR = "x-grammar"
"""The keyword of a text's schema for its grammar, in Lark."""


def functions_of(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and parameters' schema of each function."""
    for tool in tools:
        function = tool["function"]
        yield function["name"], function.get("parameters") or {"type": "object", "properties": {}}


def text(value: str) -> Structure:
    return {"type": "const_string", "value": value}


def json_schema(schema: Any) -> Structure:
    return {"type": "json_schema", "json_schema": schema}


def json_value(schema: Any) -> Structure:
    """A JSON document: of a schema, or a text of a grammar that the schema has, or an object of
    one such text."""
    if isinstance(schema, Mapping):
        if isinstance(lark := schema.get(GRAMMAR), str):
            return sequence(text('"'), grammar(escaped(lark)), text('"'))
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and len(properties) == 1:
            [(name, value)] = properties.items()
            if isinstance(value, Mapping) and GRAMMAR in value:
                return sequence(text(f"{{{json.dumps(name)}: "), json_value(value), text("}"))
    return json_schema(schema)


def refuse_grammars(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError for a custom tool with a grammar, where a format cannot hold to it."""
    for name, schema in functions_of(tools):
        properties = schema.get("properties")
        for value in properties.values() if isinstance(properties, Mapping) else ():
            if isinstance(value, Mapping) and GRAMMAR in value:
                raise RequestError(
                    f"tools: this model's calls cannot be held to the grammar of {name!r}. Use a "
                    "regex, or text.",
                    "tools",
                )


def grammar(lark: str) -> Structure:
    return {"type": "grammar", "grammar": lark}


def sequence(*elements: Structure) -> Structure:
    return {"type": "sequence", "elements": [*elements]}


def tag(begin: str, content: Structure, end: str) -> Structure:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def choice(*elements: Structure) -> Structure:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": [*elements]}


def calls(
    tools: Sequence[Mapping[str, Any]],
    begin: Callable[[str], str],
    end: str,
    *,
    parallel: bool,
    separator: str = "\n",
    content: Callable[[dict[str, Any]], Structure] = json_value,
    trigger: str | None = None,
) -> Structure:
    """One call, or several where `parallel`: each what `begin` makes of the name, the arguments,
    and `end`.

    `trigger`: what begins a call, where there need be none.
    """
    tags = [tag(begin(name), content(schema), end) for name, schema in functions_of(tools)]
    if trigger is not None:
        return {
            "type": "triggered_tags",
            "triggers": [trigger],
            "tags": tags,
            "stop_after_first": not parallel,
        }
    if not parallel:
        return choice(*tags)
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": False,
    }


def amid_text(trigger: str, begin: str, listed: Structure, end: str) -> Structure:
    """Any text, in which calls may come, at its end: what begins with `trigger` is the whole of
    them, between two texts."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": [tag(begin, listed, end)],
        "stop_after_first": True,
    }
