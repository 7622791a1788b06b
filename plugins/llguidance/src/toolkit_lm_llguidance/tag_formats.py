"""Structural tags with a format, in xgrammar's words, become a grammar in Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llguidance import grammar_from, regex_to_lark
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.checks import MAX_TEXT

MAX_FORMATS = 4096
"""Formats in each other."""
MAX_DEPTH = 32
_PARENTHESES = 4
"""Levels that are written in parentheses: llguidance takes few, and any number of rules."""
_TYPES = (
    "any_text",
    "const_string",
    "grammar",
    "json_schema",
    "or",
    "regex",
    "sequence",
    "tag",
    "tags_with_separator",
    "triggered_tags",
)

Split = Callable[[str], list[str | int]]
"""A text as pieces of text, and the ids of special tokens between them."""


class FormatGrammar:
    """Makes one grammar. Raises RequestError for a format that is none, or of a type that is not
    supported."""

    def __init__(self, param: str, schema: Callable[[Any], dict[str, Any]], split: Split) -> None:
        """`schema` checks one, and says how it is to be read."""
        self._param = param
        self._schema = schema
        self._split = split
        self._rules: list[str] = []
        self._left = MAX_FORMATS

    def lark(self, tag_format: Any) -> str:
        start = self._format(tag_format, "format", 0)
        return "\n".join(["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules])

    def _format(self, tag_format: Any, where: str, depth: int) -> str:
        """A format as a Lark expression."""
        self._left -= 1
        if depth > MAX_DEPTH or self._left < 0:
            raise self._wrong(
                where,
                f"is nested more than {MAX_DEPTH} deep, or one of more than {MAX_FORMATS} formats",
            )
        if not isinstance(tag_format, Mapping) or tag_format.get("type") not in _TYPES:
            raise self._wrong(where, f"must have a type: one of {', '.join(_TYPES)}")
        match tag_format["type"]:
            case "any_text":
                return "TEXT"
            case "const_string":
                return self._literal(self._text(tag_format, "value", where))
            case "grammar":
                return self._grammar(self._text(tag_format, "grammar", where), where)
            case "json_schema":
                return (
                    f"%json {json.dumps(self._checked(tag_format.get('json_schema', {}), where))}"
                )
            case "regex":
                return f"/{regex_to_lark(self._text(tag_format, 'pattern', where), 'dw')}/"
            case "sequence" | "or" as kind:
                elements = [
                    self._format(element, f"{where}.elements[{i}]", depth + 1)
                    for i, element in enumerate(self._list(tag_format, "elements", where))
                ]
                joined = (" " if kind == "sequence" else " | ").join(elements)
                return (
                    self._rule(joined)
                    if depth % _PARENTHESES == _PARENTHESES - 1
                    else f"({joined})"
                )
            case "tag":
                return self._tag(tag_format, where, depth)
            case "tags_with_separator":
                return self._separated(tag_format, where, depth)
            case _:
                return self._triggered(tag_format, where, depth)

    def _grammar(self, text: str, where: str) -> str:
        """A grammar of its own, in Lark or GBNF, as a rule."""
        if len(text) > MAX_TEXT:
            raise self._wrong(where, f"has {len(text)} characters; at most {MAX_TEXT} are allowed")
        try:
            lark = grammar_from("grammar", text)
        except ValueError as error:
            raise self._wrong(where, f"is not valid: {error}") from None
        return self._rule(f"%lark {{\n{lark}\n}}")

    def _tag(
        self, tag_format: Mapping[str, Any], where: str, depth: int, begin: str | None = None
    ) -> str:
        begin = self._text(tag_format, "begin", where) if begin is None else begin
        end = self._text(tag_format, "end", where)
        content = tag_format.get("content")
        if end and isinstance(content, Mapping) and content.get("type") == "any_text":
            first, *rest = self._split(end)
            return f"({self._literal(begin)} {self._up_to(first)} {' '.join(map(_written, rest))})"
        return (
            f"({self._literal(begin)} {self._format(content, f'{where}.content', depth + 1)} "
            f"{self._literal(end)})"
        )

    def _separated(self, tag_format: Mapping[str, Any], where: str, depth: int) -> str:
        tags = [
            self._tag(tag, f"{where}.tags[{i}]", depth + 1)
            for i, tag in enumerate(self._tags(tag_format, where))
        ]
        rule = self._rule(" | ".join(tags))
        more = (
            ""
            if tag_format.get("stop_after_first")
            else f" ({self._literal(self._text(tag_format, 'separator', where))} {rule})*"
        )
        return f"({rule}{more})" if tag_format.get("at_least_one") else f"({rule}{more})?"

    def _triggered(self, tag_format: Mapping[str, Any], where: str, depth: int) -> str:
        """Free text, in which a trigger begins one of the tags."""
        triggers = self._list(tag_format, "triggers", where)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise self._wrong(f"{where}.triggers", "must be a list of texts")
        options = []
        whole = []
        for index, tag_spec in enumerate(self._tags(tag_format, where)):
            begin = self._text(tag_spec, "begin", f"{where}.tags[{index}]")
            trigger = next((text for text in triggers if begin.startswith(text)), None)
            if trigger is None:
                raise self._wrong(f"{where}.tags[{index}]", "begins with none of the triggers")
            first, *rest = self._split(trigger)
            tag = self._tag(tag_spec, f"{where}.tags[{index}]", depth + 1, begin[len(trigger) :])
            options.append(" ".join([self._up_to(first), *map(_written, rest), tag]))
            whole.append(self._tag(tag_spec, f"{where}.tags[{index}]", depth + 1))
        free = self._rule(" | ".join(options))
        first_tag = f"({' | '.join(whole)})"
        if tag_format.get("stop_after_first"):
            return first_tag if tag_format.get("at_least_one") else f"(({free}) | TEXT)"
        return (
            f"({first_tag} {free}* TEXT)" if tag_format.get("at_least_one") else f"({free}* TEXT)"
        )

    def _up_to(self, end: str | int) -> str:
        """Any text, and the first `end`."""
        return (
            f"TEXT <[{end}]>"
            if isinstance(end, int)
            else self._rule(f"TEXT {json.dumps(end)}", "[lazy]")
        )

    def _literal(self, text: str) -> str:
        return " ".join(map(_written, self._split(text))) if text else '""'

    def _rule(self, expression: str, attributes: str = "") -> str:
        name = f"format_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {expression}")
        return name

    def _text(self, tag_format: Mapping[str, Any], name: str, where: str) -> str:
        text = tag_format.get(name)
        if not isinstance(text, str):
            raise self._wrong(f"{where}.{name}", "must be a text")
        return text

    def _list(self, tag_format: Mapping[str, Any], name: str, where: str) -> list[Any]:
        found = tag_format.get(name)
        if not isinstance(found, list) or not found:
            raise self._wrong(f"{where}.{name}", "must be a list, and not an empty one")
        return found

    def _tags(self, tag_format: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
        found = self._list(tag_format, "tags", where)
        if not all(isinstance(tag, Mapping) for tag in found):
            raise self._wrong(f"{where}.tags", "must be a list of tags")
        return found

    def _checked(self, schema: Any, where: str) -> dict[str, Any]:
        try:
            return self._schema(schema)
        except RequestError as error:
            raise RequestError(
                f"{str(error).rstrip('.')}, of the structural tag's {where[:200]}.", self._param
            ) from None

    def _wrong(self, where: str, why: str) -> RequestError:
        return RequestError(
            f"{self._param}: the structural tag's {where[:200]} {why}.", self._param
        )


def _written(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece)
