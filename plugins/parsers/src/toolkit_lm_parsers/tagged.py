"""TaggedCalls: calls whose parameters stand between tags, as several families write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls, dumps
from toolkit_lm_parsers.json_scanner import read_json
from toolkit_lm_parsers.reading import MAX_NAME, Reading
from toolkit_lm_parsers.schemas import Copies, Schemas
from toolkit_lm_parsers.structures import (
    ANY_TEXT,
    DIGITS,
    GRAMMAR,
    Structure,
    amid_text,
    calls,
    choice,
    grammar,
    json_schema,
    sequence,
    tag,
    text,
)

_PLACE = re.compile(r"\{\w+\}")
_BETWEEN_MARKS = re.compile(r"\n+|(?<=>)(?=<)")
_IS_TEXT = ('string="true"', 'type="string"')
_IS_JSON = ('string="false"', 'type="')
"""Attributes of a parameter that say whether its value is a text."""


def _marks(text: str) -> list[str]:
    """The marks of a text, which new lines or nothing stand between."""
    return [mark for mark in _BETWEEN_MARKS.split(text) if mark]


class Tag(NamedTuple):
    """A tag around a name: of a function, or of a parameter."""

    begin: str
    """Text up to the name."""
    end_name: str
    """Text after the name; empty: a new line or the next mark ends it."""
    end: str
    """Text that ends the tag after more attributes; empty: `end_name` ends it."""

    @classmethod
    def of(cls, before: str, after: str) -> Tag:
        """The tag of what a template writes before and after a name."""
        after = after.strip("\n")
        if after.startswith('"'):
            return cls(before, '"', _PLACE.split(after)[-1].rpartition('"')[2])
        first, second = (*_marks(after), "", "")[:2]
        return cls(before, first, second)


class Layout:
    """Calls as a family's template writes them."""

    def __init__(
        self,
        call: str,
        parameter: str,
        end: str,
        around: tuple[str, str] = ("", ""),
        *,
        separator: str = "\n",
        opens: tuple[str, ...] | None = None,
        others: tuple[str, ...] = (),
    ) -> None:
        """`call`: text up to the first parameter, with {name}, and {number} where the call has one.

        `parameter`: text of one, with {name} and {value}, {type} of the value, and {is_text} where
        it says true or false. `end`: text after the last one. `around`: texts before and after all
        calls. `separator`: text between calls. `opens`: marks before a call's own; None: those of
        `call`. `others`: marks beside calls that mean nothing.
        """
        self.call = call
        self.parameter = parameter
        self.around = around
        self.separator = separator
        self.end = end
        before, after = call.split("{name}")
        *outer, begin = _marks(before)
        self.function = Tag.of(begin, after)
        self.key_begin, rest = parameter.split("{name}")
        self.key_end, self.value_end = rest.split("{value}")
        self.key = Tag.of(self.key_begin, self.key_end)
        self.end_value = self.value_end.strip("\n")
        self.are_lines = self.value_end.startswith("\n")
        """A value stands on lines of its own."""
        ends = _marks(end)
        self.end_function = ends[0]
        opens = (*_marks(around[0]), *outer) if opens is None else opens
        self.opens = tuple(dict.fromkeys(opens))
        """Marks before a call's own."""
        self.closes = tuple(dict.fromkeys((*ends[1:], *_marks(around[1]))))
        """Marks after a call's own."""
        self.others = others


class TaggedCalls(MarkedCalls):
    """Reads calls of one layout."""

    layout: Layout
    _unclosed_to = 0
    """Up to this position of the answer no parameter's end comes."""

    def set_layout(self, layout: Layout) -> None:
        """Reads calls of this layout from now on."""
        self.layout = layout
        self.opens = (*layout.opens, layout.function.begin, *layout.others)
        closes = (*layout.closes, layout.end_function, layout.end_value, layout.key.begin)
        self.closes = tuple(dict.fromkeys(closes))
        self._in_value = tuple(
            dict.fromkeys(
                (
                    layout.end_value,
                    layout.key.begin,
                    layout.end_function,
                    *layout.opens,
                    layout.function.begin,
                    *layout.closes,
                )
            )
        )

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark != self.layout.function.begin:
            # Around all calls, or beside them: nothing of its own.
            return True
        done = yield from self.tagged_call()
        if done:
            yield from self.spaces()
            for close in self.layout.closes:
                yield from self.close(close)
        return done

    def tagged_call(self) -> Reading[bool]:
        """A call whose first mark was read. False: it is none."""
        found = yield from self._name(self.layout.function)
        if found is None:
            return False
        name, _ = found
        yield from self.spaces()
        if (yield from self.peek()) == "{":
            arguments = yield from self.json_arguments()
            yield from self.spaces()
            yield from self.accept(self.layout.end_function)
        else:
            arguments = yield from self._parameters(name)
        return arguments is not None and self.call(name, arguments)

    def _name(self, tag: Tag) -> Reading[tuple[str, str] | None]:
        """Reads a name and the attributes after it, up to the end of a tag. Quotes around the name
        are removed."""
        layout = self.layout
        ends = (tag.end_name,) if tag.end_name else ("\n", layout.key.begin, layout.end_function)
        name = yield from self.word((*ends, *self.opens))
        if name is None or (tag.end_name and not (yield from self.accept(tag.end_name))):
            return None
        attributes = ""
        if tag.end and not (yield from self._accept_end(tag.end)):
            attributes = (yield from self.word((tag.end,))) or ""
            if not (yield from self.accept(tag.end)):
                return None
        name = name.strip("\"'")
        return (name, attributes) if name else None

    def _accept_end(self, mark: str) -> Reading[bool]:
        """Reads a tag's end, which may stand on a line of its own."""
        if mark.startswith("<"):
            yield from self.spaces()
        return (yield from self.accept(mark))

    def _parameters(self, name: str) -> Reading[str | None]:
        """The JSON of all parameters. None: they are malformed."""
        layout = self.layout
        schemas = Schemas(self.functions.get(name, {}).get("parameters"))
        written: list[str] = []
        while True:
            yield from self.spaces()
            mark = yield from self.accept_any((layout.key.begin, layout.end_function))
            if (
                mark is None
                and written
                and ((self.at_end and not self.cut) or (yield from self.comes(layout.closes)))
            ):
                mark = layout.end_function
            if mark == layout.end_function:
                return f"{{{', '.join(written)}}}"
            found = (yield from self._name(layout.key)) if mark else None
            value = None if found is None else (yield from self._value(schemas))
            if found is None or value is None:
                return None
            key, attributes = found
            if layout.are_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            schema = schemas.property(schemas.root, key)
            argument = None
            if any(mark in attributes for mark in _IS_TEXT):
                argument = dumps(value)
            elif any(mark in attributes for mark in _IS_JSON):
                argument = read_json(value)
            written.append(f"{dumps(key)}: {argument or schemas.argument(value, schema)}")

    def _value(self, schemas: Schemas) -> Reading[str | None]:
        """A parameter's text, up to its end: other marks before it are a part of the text. None:
        there is none.

        Where no end of it comes before the call's, it ends where the next thing begins. A call that
        begins in it shows that the model has given this one up.
        """
        layout = self.layout
        starts = (*layout.opens, layout.function.begin)
        closes = layout.closes or (layout.end_function,)
        read: list[str] = []
        places: dict[str, int] = {}
        """Positions of the marks of calls in the text read so far."""
        end: int | None = None
        """Position where the next item begins."""
        length = 0
        is_function = False
        while True:
            piece: list[str] = []
            mark = yield from self.until(self._in_value, piece.append)
            read += (text := "".join(piece), mark or "")
            length += len(text)
            if mark == layout.end_value:
                return "".join(read[:-1])
            if mark is None:
                break
            at = length
            length += len(mark)
            if mark == layout.key.begin and is_function and self._is_name(text):
                # Another call has begun.
                break
            is_function = mark == layout.function.begin
            if mark == layout.key.begin:
                name = yield from self._inner_name()
                read.append(name)
                length += len(name)
                is_end = name.endswith(layout.key.end_name) and schemas.may_have(
                    schemas.root, name.removesuffix(layout.key.end_name).strip("\"' ")
                )
            else:
                is_end = mark == layout.end_function
            if is_end and end is None:
                end = at
            if mark in (*starts, *closes):
                places.setdefault(mark, at)
            is_over = self.position <= self._unclosed_to or any(close in places for close in closes)
            if end is not None and is_over:
                break
        if mark is None and self.cut:
            return None
        self._unclosed_to = max(self._unclosed_to, self.position)
        first = min(places, key=lambda mark: places[mark], default=None)
        if first is not None and (end is None or places[first] < end):
            if first not in closes:
                return None
            end = places[first]
        if end is None:
            return None
        self.unread(length - end)
        return "".join(read)[:end]

    def _is_name(self, text: str) -> bool:
        """Whether a text between the marks of a function and of a parameter is a function's name,
        with the end of its tag."""
        if not self.layout.function.end_name:
            return text.strip() in self.functions
        return text.count(">") == 1 and text.rstrip().endswith(">")

    def _inner_name(self) -> Reading[str]:
        """Reads a possible parameter name, with what ends it."""
        name = ""
        last = self.layout.key.end_name[-1]
        while (
            len(name) < MAX_NAME
            and (character := (yield from self.peek()))
            and (character not in "<\n" or self.layout.key.end_name.startswith("<"))
        ):
            name += character
            self.at += 1
            if character == last:
                break
        return name


class LayoutParser(TaggedCalls):
    """Reads calls of the layout that it is made with."""

    def __init__(self, layout: Layout, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.set_layout(layout)


def refusal(template: str, shown_by: Sequence[str], not_shown_by: Sequence[str]) -> str | None:
    """Why a template is not of a format whose templates have `shown_by` and not `not_shown_by`;
    None: it is."""
    for mark in shown_by:
        if mark not in template:
            return f"the chat template writes no {mark}"
    other = next((mark for mark in not_shown_by if mark in template), None)
    return None if other is None else f"the chat template writes {other}"


class TaggedFormat(AnswerFormat):
    """A format whose calls have a layout. A family is a subclass that states it."""

    finds = ("tool_calls",)
    layout: ClassVar[Layout]
    shown_by: ClassVar[tuple[str, ...]]
    """Texts that a template of this format has, all of them."""
    not_shown_by: ClassVar[tuple[str, ...]] = ()
    """Texts of templates of other formats that have those of `shown_by` too."""

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return refusal(template, cls.shown_by, cls.not_shown_by)

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return LayoutParser(self.layout, tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        layout = self.layout
        begin, end = layout.around
        trigger = (*_marks(begin), *layout.opens, layout.function.begin)[0]
        before, after = layout.call.split("{name}")
        head, has_number, rest = after.partition("{number}")
        copies = Copies()

        def content(schema: dict[str, Any]) -> Structure:
            written = parameters_of(layout, Schemas(schema, copies))
            return sequence(DIGITS, text(rest), written) if has_number else written

        listed = calls(
            tools,
            lambda name: f"{before}{name}{head}",
            layout.end,
            parallel=parallel,
            separator=layout.separator,
            content=content,
            trigger=None if required or begin else trigger,
        )
        if begin and not required:
            return amid_text(trigger, begin, listed, end)
        return sequence(text(begin), listed, text(end)) if begin else listed


def parameters_of(layout: Layout, schemas: Schemas) -> Structure:
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
    properties = whole["properties"]
    for key, schema in properties.items() if isinstance(properties, Mapping) else ():
        kinds = schemas.kinds(schema)
        content = value_of(schemas, schema, kinds)
        key_end = layout.key_end
        if _PLACE.search(key_end):
            # A value that may be a text is one, as any text is.
            names = kinds or {"string"}
            kind = "string" if "string" in names else min(names).replace("integer", "number")
            key_end = key_end.replace("{is_text}", str(kind == "string").lower())
            key_end = key_end.replace("{type}", kind)
        begin = f"{layout.key_begin}{key}{key_end}"
        written = tag(begin, content, layout.value_end)
        elements.append(written if key in required else choice(written, text("")))
    return sequence(*elements) if elements else text("")


def value_of(schemas: Schemas, schema: Any, kinds: frozenset[str] | None) -> Structure:
    """A parameter's value, of a schema of these kinds: a text is written without quotes."""
    if not isinstance(schema, Mapping) or kinds is None:
        return ANY_TEXT
    if isinstance(lark := schema.get(GRAMMAR), str):
        return grammar(lark)
    if "string" not in kinds:
        return json_schema(schemas.alone(schema))
    keywords = schemas.keywords(schema, "const", "enum", "anyOf", "oneOf", "pattern")
    if not {"anyOf", "oneOf"} & keywords.keys() and (listed := schemas.values_of(keywords)):
        return choice(
            *(text(value if isinstance(value, str) else dumps(value)) for value in listed)
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
