"""Structures of answers with content and tool calls, as the `format` of structural tags."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolkit_lm.renderer import AnswerDelta, AnswerParser

ANY_TEXT: dict[str, Any] = {"type": "any_text"}
_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_BEGINS_JSON = re.compile(r'\s*(\{|\[\s*($|["{\[\d\-tfn\]]))')


def either(*elements: dict[str, Any]) -> dict[str, Any]:
    """The structure of what has one of several."""
    return {"type": "or", "elements": [*elements]}


def content_structure(asked: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Returns the structure of the content that a request's own fields ask for, and the options of
    `structured_outputs` beside it. None if a structural tag cannot express it."""
    if len(asked) != 1:
        return None, {}
    [(name, value)] = asked.items()
    options: dict[str, Any] = {}
    if name == "response_format":
        if not isinstance(value, Mapping):
            return None, {}
        kinds, options = _of_format(value)
    elif name == "structured_outputs":
        stated = (
            {key: item for key, item in value.items() if item is not None and item is not False}
            if isinstance(value, Mapping)
            else {}
        )
        options = {key: item for key, item in stated.items() if key in _OPTIONS}
        kinds = {key: item for key, item in stated.items() if key not in _OPTIONS}
    else:
        kind = {"json_schema": "json", "ebnf": "grammar"}.get(name, name.removeprefix("guided_"))
        kinds = {kind: value}
    if len(kinds) != 1:
        return None, {}
    [(kind, value)] = kinds.items()
    return _structure(kind, value), options


def _of_format(form: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The kind of structure that a response_format asks for, and its options."""
    schema = form.get("json_schema")
    plain = form.get("schema", form.get("value"))
    match form.get("type"):
        case "json_object":
            return {"json_object": True} if plain is None else {"json": plain}, {}
        case "json_schema" if isinstance(schema, Mapping):
            is_strict = schema.get("strict") is True
            return {"json": schema.get("schema", {})}, (
                {"disable_additional_properties": True} if is_strict else {}
            )
        case "json_schema":
            return {"json": plain}, {}
        case "structural_tag":
            return {"structural_tag": form}, {}
    return {}, {}


def _structure(kind: str, value: Any) -> dict[str, Any] | None:
    match kind, value:
        case "json", dict():
            return {"type": "json_schema", "json_schema": value}
        case "json_object", True:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case "regex", str():
            return {"type": "regex", "pattern": value}
        case "grammar", str():
            return {"type": "grammar", "grammar": value}
        case "choice", [*_] if value and all(isinstance(item, str) for item in value):
            return either(*({"type": "const_string", "value": item} for item in value))
        case "structural_tag", {"format": dict(form)}:
            return form
    return None


def beginnings_of(structure: Mapping[str, Any]) -> list[str]:
    """The texts with which an answer of a structure begins, as far as they are known."""
    match structure:
        case {"type": "const_string", "value": str(text)}:
            return [text]
        case {"type": "tag", "begin": str(begin)} if begin:
            return [begin]
        case {"type": "tag", "content": Mapping() as content}:
            return beginnings_of(content)
        case {"type": "sequence", "elements": [first, *rest]}:
            after = [""]
            if first.get("type") == "const_string" and rest:
                after = beginnings_of({"type": "sequence", "elements": rest})
            return [begin + more for begin in beginnings_of(first) for more in after]
        case {"elements": [*options]} | {"tags": [*options]}:
            return [begin for option in options for begin in beginnings_of(option)]
    return [""]


def may_begin_json(text: str) -> bool:
    """Whether a JSON document may begin as a text does."""
    return _BEGINS_JSON.match(text) is not None


class CallsOrContent(AnswerParser):
    """Reads an answer that a grammar holds to calls, or to content of a structure: by its first
    characters, which of them it is. A content may have marks of calls in its texts."""

    def __init__(self, calls: AnswerParser, beginnings: tuple[str, ...]) -> None:
        """`beginnings`: texts with which calls begin."""
        self._calls = calls
        self._beginnings = beginnings
        self._held = ""
        self._is_call: bool | None = None

    def push(self, text: str) -> AnswerDelta:
        if self._is_call is None:
            self._held += text
            begun = self._held.lstrip()
            if begun.startswith(self._beginnings):
                self._is_call = True
            elif any(beginning.startswith(begun) for beginning in self._beginnings):
                return AnswerDelta()
            else:
                self._is_call = False
            text, self._held = self._held, ""
        return self._calls.push(text) if self._is_call else AnswerDelta(text)

    def finish(self, *, cut: bool) -> AnswerDelta:
        first = self._calls.push(self._held)
        last = self._calls.finish(cut=cut)
        return AnswerDelta(
            first.content + last.content,
            first.reasoning + last.reasoning,
            (*first.tool_calls, *last.tool_calls),
        )

    @property
    def num_held_back(self) -> int:
        return len(self._held) + self._calls.num_held_back

    @property
    def calls_tools(self) -> bool:
        return self._calls.calls_tools
