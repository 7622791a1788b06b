"""MarkedJsonFormat: calls as JSON between marks, in the ways in which several families write
them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.structures import (
    DIGITS,
    Structure,
    amid_text,
    calls,
    json_value,
    sequence,
    text,
)
from toolkit_lm_parsers.tagged import refusal


class JsonLayout(NamedTuple):
    """Calls as a family writes them, of its marks and JSON."""

    around: tuple[str, str] = ("", "")
    """Texts before and after all calls."""
    call: tuple[str, str] = ("", "")
    """Texts before and after each."""
    is_list: bool = False
    """The calls are a JSON list. False: one object after the other."""
    separator: str = "\n"
    """Text between calls outside a list."""
    keys: tuple[str, str] | None = ("name", "arguments")
    """Keys of an object for the function's name and arguments. None: the name is the key of the
    arguments."""
    name: tuple[str, str] | None = None
    """Texts before a name and after it, where the name stands before its arguments and not in an
    object. {number} in the latter is the number of the call."""
    others: tuple[str, ...] = ()
    """Marks beside calls that mean nothing."""
    words: tuple[str, ...] = ()
    """Other texts that begin calls of this layout, and are content where no call follows."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Marks that begin calls."""
        marks = (self.around[0].strip(), self.call[0].strip(), *self.words, *self.others)
        return tuple(dict.fromkeys(filter(None, marks)))

    @property
    def closes(self) -> tuple[str, ...]:
        """Marks that end calls."""
        return tuple(filter(None, (self.call[1].strip(), self.around[1].strip())))


class MarkedJsonParser(MarkedCalls):
    """Reads calls of one layout."""

    def __init__(self, layout: JsonLayout, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.layout = layout
        self.opens = layout.opens
        self.closes = layout.closes
        self.words = layout.words
        if layout.keys is not None:
            self.names = (*self.names, layout.keys[0])

    def read_calls(self, mark: str) -> Reading[bool]:
        layout = self.layout
        if mark in layout.others or (mark == layout.around[0].strip() and layout.call[0]):
            # Around all calls, or beside them: nothing of its own.
            return True
        yield from self.spaces()
        if layout.name is not None:
            done = yield from self._named_call(*layout.name)
        elif layout.keys is None:
            done = yield from self._keyed_calls()
        else:
            done = yield from self.json_calls(is_list=mark.endswith("["))
        if done:
            yield from self.spaces()
            for close in self.closes:
                yield from self.close(close)
        return done

    def _named_call(self, before: str, after: str) -> Reading[bool]:
        """A name, a text, and arguments."""
        end, has_number, mark = after.partition("{number}")
        if not has_number:
            end = ""
            mark = after
        yield from self.accept(before)
        name = yield from self.word((mark, "\n", "{", *self.closes, *self.opens))
        if name is None:
            return False
        yield from self.spaces()
        yield from self.accept(mark)
        yield from self.spaces()
        if has_number:
            # Only the number's digits are dropped: a name may have the text before it.
            called, found, number = name.rpartition(end)
            if found and number.isdigit():
                self.call_id = f"{before}{name}"
                name = called
        arguments = yield from self.json_arguments(name)
        return arguments is not None and self.call(name, arguments)

    def _keyed_calls(self) -> Reading[bool]:
        """Objects such as {"f": {...}}, in a list."""
        yield from self.accept("[")
        yield from self.spaces()
        done = False
        while (yield from self.accept("{")):
            yield from self.spaces()
            name = yield from self.json_text(is_key=True)
            yield from self.spaces()
            if not name or not (yield from self.accept(":")):
                return False
            yield from self.spaces()
            arguments = yield from self.json_arguments(name)
            if arguments is None:
                return False
            yield from self.spaces()
            if not (yield from self.accept("}")) and not (yield from self.ends_here()):
                return False
            if not self.call(name, arguments):
                return False
            done = True
            self.keep()
            yield from self.spaces()
            yield from self.accept(",")
            yield from self.spaces()
        yield from self.accept("]")
        return done


class MarkedJsonFormat(AnswerFormat):
    """A format whose calls are JSON between marks. A family is a subclass that states its
    layout."""

    finds = ("tool_calls",)
    layout: ClassVar[JsonLayout]
    shown_by: ClassVar[tuple[str, ...]]
    """Texts that a template of this format has, all of them."""
    not_shown_by: ClassVar[tuple[str, ...]] = ()
    """Texts of templates of other formats that have those of `shown_by` too."""

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return refusal(template, cls.shown_by, cls.not_shown_by)

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return MarkedJsonParser(self.layout, tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        layout = self.layout
        trigger = (layout.around[0] or layout.call[0]).strip()
        if not (required or trigger.startswith(("<", "["))):
            # Words that begin calls are a part of any text.
            return None
        opening, closing = layout.around
        after_name = "" if layout.name is None else layout.name[1]
        middle, has_number, number = after_name.partition("{number}")

        def begin(name: str) -> str:
            """Text of a call up to its arguments, or its number."""
            first = layout.call[0]
            if layout.name is not None:
                return f"{first}{layout.name[0]}{name}{middle}"
            if layout.keys is None:
                return f"{first}{{{json.dumps(name)}: "
            key, arguments = layout.keys
            return f'{first}{{"{key}": {json.dumps(name)}, "{arguments}": '

        def content(schema: dict[str, Any]) -> Structure:
            arguments = json_value(schema)
            return sequence(DIGITS, text(number), arguments) if has_number else arguments

        listed = calls(
            tools,
            begin,
            f"{'' if layout.name else '}'}{layout.call[1]}",
            parallel=parallel,
            separator=", " if layout.is_list else layout.separator,
            content=content,
            trigger=None if required or layout.around[0] else trigger,
        )
        if layout.is_list:
            opening, closing = f"{opening}[", f"]{closing}"
        if opening and not required:
            return amid_text(trigger, opening, listed, closing)
        return sequence(text(opening), listed, text(closing)) if opening else listed
