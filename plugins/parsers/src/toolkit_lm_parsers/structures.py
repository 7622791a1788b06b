"""Structures: what an answer must be, as the `format` of structural tags."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Structure = dict[str, Any]
ANY_TEXT: Structure = {"type": "any_text"}


def functions_of(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and parameters' schema of each function."""
    for tool in tools:
        function = tool["function"]
        yield function["name"], function.get("parameters") or {"type": "object", "properties": {}}


def text(value: str) -> Structure:
    return {"type": "const_string", "value": value}


def json_schema(schema: Any) -> Structure:
    return {"type": "json_schema", "json_schema": schema}


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
    content: Callable[[dict[str, Any]], Structure] = json_schema,
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
