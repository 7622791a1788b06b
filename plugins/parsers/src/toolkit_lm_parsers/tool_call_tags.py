"""Calls between <tool_call> and </tool_call>: of Hermes and Qwen as JSON, of Qwen3-Coder as XML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls, dumps
from toolkit_lm_parsers.reading import MAX_NAME, Reading
from toolkit_lm_parsers.schemas import Copies, Schemas
from toolkit_lm_parsers.structures import (
    ANY_TEXT,
    Structure,
    calls,
    choice,
    json_schema,
    sequence,
    tag,
    text,
)

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"
_IN_VALUE = (_END_PARAMETER, _PARAMETER, _END_FUNCTION, _OPEN, _FUNCTION, _CLOSE)
"""Marks that a parameter's value may end at, or not."""


class ToolCallTagParser(MarkedCalls):
    """Reads both: a model of one kind that has seen the other may write it."""

    opens: tuple[str, ...] = (_OPEN,)
    closes = (_CLOSE, _END_FUNCTION, _END_PARAMETER, _PARAMETER)
    _unclosed_to = 0
    """Up to this position of the answer no </parameter> comes."""

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark != _FUNCTION:
            yield from self.spaces()
            is_xml = yield from self.accept(_FUNCTION)
        else:
            is_xml = True
        done = yield from (self._xml_call() if is_xml else self.json_calls())
        if done:
            yield from self.spaces()
            yield from self.close(_CLOSE)
        return done

    def _xml_call(self) -> Reading[bool]:
        name = yield from self._name()
        if name is None:
            return False
        yield from self.spaces()
        if (yield from self.peek()) == "{":
            arguments = yield from self.json_arguments()
            yield from self.spaces()
            yield from self.accept(_END_FUNCTION)
        else:
            arguments = yield from self._parameters(name)
        return arguments is not None and self.call(name, arguments)

    def _name(self) -> Reading[str | None]:
        """Reads a function's name up to the end of a tag. Quotes around it are removed."""
        name = yield from self.word((">",))
        return (name.strip("\"'") or None) if name and (yield from self.accept(">")) else None

    def _parameters(self, name: str) -> Reading[str | None]:
        """The JSON of all parameters. None: they are malformed."""
        schemas = Schemas(self.functions.get(name, {}).get("parameters"))
        written: list[str] = []
        while True:
            mark = yield from self.accept_any((_PARAMETER, _END_FUNCTION))
            if (
                mark is None
                and written
                and ((self.at_end and not self.cut) or (yield from self.comes((_CLOSE,))))
            ):
                mark = _END_FUNCTION
            if mark == _END_FUNCTION:
                return f"{{{', '.join(written)}}}"
            key = (yield from self._name()) if mark else None
            value = None if key is None else (yield from self._value(schemas))
            if key is None or value is None:
                return None
            text = value.removeprefix("\n").removesuffix("\n")
            written.append(
                f"{dumps(key)}: {schemas.argument(text, schemas.property(schemas.root, key))}"
            )
            yield from self.spaces()

    def _value(self, schemas: Schemas) -> Reading[str | None]:
        """A parameter's text, up to </parameter>: other marks before it are a part of the text.
        None: there is none.

        Where no </parameter> comes before the call's end, it ends where the next thing begins. A
        call that begins in it shows that the model has given this one up.
        """
        read: list[str] = []
        places: dict[str, int] = {}
        """Positions of the marks of calls in the text read so far."""
        end: int | None = None
        """Position where the next item begins."""
        length = 0
        is_function = False
        while True:
            piece: list[str] = []
            mark = yield from self.until(_IN_VALUE, piece.append)
            text = "".join(piece)
            read += (text, mark or "")
            length += len(text)
            if mark == _END_PARAMETER:
                return "".join(read[:-1])
            if mark is None:
                break
            at = length
            length += len(mark)
            ends_tag = text.count(">") == 1 and text.rstrip().endswith(">")
            if mark == _PARAMETER and is_function and ends_tag:
                # Another call has begun.
                break
            is_function = mark == _FUNCTION
            if mark == _PARAMETER:
                name = yield from self._inner_name()
                read.append(name)
                length += len(name)
                is_end = name.endswith(">") and schemas.may_have(
                    schemas.root, name[:-1].strip("\"' ")
                )
            else:
                is_end = mark == _END_FUNCTION
            if is_end and end is None:
                end = at
            if mark in (_OPEN, _FUNCTION, _CLOSE):
                places.setdefault(mark, at)
            if end is not None and (_CLOSE in places or self.position <= self._unclosed_to):
                break
        if mark is None and self.cut:
            return None
        self._unclosed_to = max(self._unclosed_to, self.position)
        first = min(places, key=lambda mark: places[mark], default=None)
        if first is not None and (end is None or places[first] < end):
            if first != _CLOSE:
                return None
            end = places[first]
        if end is None:
            return None
        self.unread(length - end)
        return "".join(read)[:end]

    def _inner_name(self) -> Reading[str]:
        """Reads a possible parameter name, with the bracket that ends it."""
        name = ""
        while (
            len(name) < MAX_NAME
            and (character := (yield from self.peek()))
            and character not in "<\n"
        ):
            name += character
            self.at += 1
            if character == ">":
                break
        return name


class QwenCoderParser(ToolCallTagParser):
    opens = (_OPEN, _FUNCTION)


class HermesFormat(AnswerFormat):
    """Hermes 2, Qwen 2.5 and Qwen 3: <tool_call>{"name": ..., "arguments": ...}</tool_call>."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        if _OPEN not in template:
            return f"the chat template writes no {_OPEN}"
        return "its calls are XML" if "<function=" in template or "<arg_key>" in template else None

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return ToolCallTagParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        def begin(name: str) -> str:
            return f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": '

        return calls(
            tools, begin, f"}}\n{_CLOSE}", parallel=parallel, trigger=None if required else _OPEN
        )


class QwenCoderFormat(AnswerFormat):
    """Qwen3-Coder:
    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return (
            None
            if _FUNCTION in template and _PARAMETER in template
            else f"the chat template writes no {_FUNCTION}...>"
        )

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return QwenCoderParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        def begin(name: str) -> str:
            return f"{_OPEN}\n{_FUNCTION}{name}>\n"

        copies = Copies()

        def content(schema: dict[str, Any]) -> Structure:
            return _parameters(Schemas(schema, copies))

        trigger = None if required else _OPEN
        return calls(
            tools,
            begin,
            f"{_END_FUNCTION}\n{_CLOSE}",
            parallel=parallel,
            content=content,
            trigger=trigger,
        )


def _parameters(schemas: Schemas) -> Structure:
    """The structure of all parameters. Required ones must come, in the schema's order. A schema
    without properties allows any text."""
    whole = schemas.merged(schemas.root)
    if "properties" not in whole:
        return ANY_TEXT
    required_names = whole.get("required")
    required = (
        frozenset(name for name in required_names if isinstance(name, str))
        if isinstance(required_names, list)
        else frozenset[str]()
    )
    elements: list[Structure] = []
    for key, schema in _mapping(whole["properties"]).items():
        begin = f"{_PARAMETER}{key}>\n"
        end = f"\n{_END_PARAMETER}\n"
        written = tag(begin, _content(schemas, schema), end)
        elements.append(written if key in required else choice(written, text("")))
    return sequence(*elements) if elements else text("")


def _content(schemas: Schemas, schema: Any) -> Structure:
    """A parameter's value: a text is written without quotes."""
    kinds = schemas.kinds(schema)
    if not isinstance(schema, Mapping) or kinds is None:
        return ANY_TEXT
    if "string" not in kinds:
        return json_schema(schemas.alone(schema))
    keywords = schemas.keywords(schema, "const", "enum", "anyOf", "oneOf", "pattern")
    if not {"anyOf", "oneOf"} & keywords.keys() and (listed := schemas.values_of(keywords)):
        return choice(
            *(text(value if isinstance(value, str) else json.dumps(value)) for value in listed)
        )
    if (
        kinds == {"string"}
        and isinstance(pattern := keywords.get("pattern"), str)
        and _is_whole(pattern)
    ):
        return {"type": "regex", "pattern": pattern[1:-1]}
    # Any text may contain a value that is not a text.
    return ANY_TEXT


def _is_whole(pattern: str) -> bool:
    """Whether a pattern matches a whole text, without lookaround or back references."""
    looks = pattern.replace("(?:", "").count("(?") or any(
        f"\\{digit}" in pattern for digit in "123456789"
    )
    return (
        pattern.startswith("^")
        and pattern.endswith("$")
        and not pattern.endswith("\\$")
        and not looks
    )


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
