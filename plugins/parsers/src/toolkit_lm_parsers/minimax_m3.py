"""MiniMax M3's calls: tags with a namespace, in which parameters are elements by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls, dumps
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.schemas import OF_TEXT, Copies, Schemas
from toolkit_lm_parsers.structures import (
    Structure,
    amid_text,
    calls,
    choice,
    json_schema,
    sequence,
    tag,
    text,
)
from toolkit_lm_parsers.tagged import refusal, value_of

_NS = "]<]minimax[>["
_CALLS = f"{_NS}<tool_call>"
_END_CALLS = f"{_NS}</tool_call>"
_CALL = f'{_NS}<invoke name="'
_END_CALL = f"{_NS}</invoke>"
_ITEM = "item"
_DEEPEST = 16
"""Elements in each other that are read."""
_DEEPEST_HELD = 3
"""Elements in each other that a grammar writes; what is deeper is JSON."""


class MiniMaxTagsParser(MarkedCalls):
    """Reads calls of elements: a value is a text, other elements, or items of a list."""

    opens = (_CALLS, _CALL)
    closes = (_END_CALL, _END_CALLS)

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark == _CALLS:
            # Around all calls: nothing of its own.
            return True
        name = yield from self.word(('"', _NS))
        if name is None or not (yield from self.accept('"')):
            return False
        yield from self.spaces()
        if not (yield from self.accept(">")):
            return False
        schemas = Schemas(self.functions.get(name, {}).get("parameters"))
        written: list[str] = []
        while True:
            yield from self.spaces()
            if (yield from self.accept(_END_CALL)):
                break
            if (yield from self.comes((_CALL, _END_CALLS))) or (self.at_end and not self.cut):
                # The call was not closed.
                break
            if not (yield from self.accept(_NS)):
                return False
            element = yield from self._element(schemas, schemas.root, 0)
            if element is None:
                return False
            written.append(f"{dumps(element[0])}: {element[1]}")
        if not self.call(name, f"{{{', '.join(written)}}}"):
            return False
        yield from self.spaces()
        yield from self.close(_END_CALLS)
        return True

    def _element(
        self, schemas: Schemas, parent: Any, depth: int
    ) -> Reading[tuple[str, str] | None]:
        """The name and the JSON of an element, whose namespace was read. `parent`: the schema of
        what it is in. None: it is none, or is not closed."""
        if depth > _DEEPEST or not (yield from self.accept("<")):
            return None
        name = yield from self.word((">", _NS))
        if name is None or name.startswith("/") or not (yield from self.accept(">")):
            return None
        is_item = name == _ITEM and (schemas.kinds(parent) or {"array"}) >= {"array"}
        schema = schemas.items(parent) if is_item else schemas.property(parent, name)
        read: list[str] = []
        inner: list[tuple[str, str]] = []
        while True:
            if (yield from self.until((_NS,), read.append)) is None:
                return None
            if (yield from self.accept(f"</{name}>")):
                break
            element = yield from self._element(schemas, schema, depth + 1)
            if element is None:
                return None
            inner.append(element)
        return name, self._value("".join(read), inner, schemas, schema)

    @staticmethod
    def _value(read: str, inner: list[tuple[str, str]], schemas: Schemas, schema: Any) -> str:
        """The JSON of an element's content."""
        kinds = schemas.kinds(schema) or frozenset()
        if inner:
            are_items = all(name == _ITEM for name, _ in inner) and "object" not in kinds
            if are_items or kinds == {"array"}:
                return f"[{', '.join(value for _, value in inner)}]"
            return f"{{{', '.join(f'{dumps(name)}: {value}' for name, value in inner)}}}"
        if not read.strip() and kinds and "string" not in kinds:
            if "array" in kinds:
                return "[]"
            if "object" in kinds:
                return "{}"
        return schemas.argument(read, schema)


class MiniMaxTagsFormat(AnswerFormat):
    """MiniMax M3: <tool_call><invoke name="f"><key>value</key></invoke></tool_call>, each tag with
    a namespace before it."""

    finds = ("tool_calls",)
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return refusal(template, (_NS,), ())

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return MiniMaxTagsParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        copies = Copies()

        def content(schema: dict[str, Any]) -> Structure:
            schemas = Schemas(schema, copies)
            return _elements(schemas, schemas.merged(schemas.root), 0, copies) or text("")

        listed = calls(
            tools, lambda name: f'{_CALL}{name}">', _END_CALL, parallel=parallel, content=content
        )
        begin = f"{_CALLS}\n"
        end = f"\n{_END_CALLS}"
        if not required:
            return amid_text(_CALLS, begin, listed, end)
        return sequence(text(begin), listed, text(end))


def _elements(
    schemas: Schemas, whole: Mapping[str, Any], depth: int, copies: Copies
) -> Structure | None:
    """The structure of an object's properties: the required ones, and any of the others, in the
    schema's order. None: it names none. `copies` counts the inner ones: each reference to an object
    has them anew."""
    properties = whole.get("properties")
    if not isinstance(properties, Mapping) or not properties:
        return None
    names = whole.get("required")
    required = names if isinstance(names, list) else []
    written = []
    for name, schema in properties.items():
        if depth > 0:
            copies.charge(2 * (OF_TEXT + len(name)))
        element = _element(schemas, name, schema, depth, copies)
        written.append(element if name in required else choice(element, text("")))
    return sequence(*written)


def _element(schemas: Schemas, name: str, schema: Any, depth: int, copies: Copies) -> Structure:
    kinds = schemas.kinds(schema)
    content: Structure | None = None
    if kinds == frozenset(("object",)):
        if depth < _DEEPEST_HELD:
            content = _elements(schemas, schemas.merged(schema), depth + 1, copies)
        content = content or json_schema(schemas.alone(schema))
    elif (
        kinds == frozenset(("array",))
        and depth < _DEEPEST_HELD
        and schemas.items(schema) is not None
    ):
        item = _element(schemas, _ITEM, schemas.items(schema), depth + 1, copies)
        content = {
            "type": "tags_with_separator",
            "tags": [item],
            "separator": "",
            "at_least_one": bool(schemas.keywords(schema, "minItems").get("minItems")),
        }
    return tag(f"{_NS}<{name}>", content or value_of(schemas, schema, kinds), f"{_NS}</{name}>")
