"""PythonCalls: calls in the manner of Python, of Llama 3.2 and 4, LFM2 and OLMo 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import JsonCalls, MarkedCalls, dumps
from toolkit_lm_parsers.json_scanner import MAX_DEPTH, literal
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.scanning import is_readable
from toolkit_lm_parsers.schemas import Schemas
from toolkit_lm_parsers.structures import (
    ANY_TEXT,
    Structure,
    amid_text,
    calls,
    choice,
    json_value,
    sequence,
    tag,
    text,
)
from toolkit_lm_parsers.tagged import refusal

_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "0": "\0",
    "\n": "",
}
_CODES = {"x": 2, "u": 4, "U": 8}


class PythonCalls(JsonCalls):
    """Reads calls such as f(a=1, b="x") of functions of the request."""

    def python_list(self) -> Reading[bool]:
        """The calls of a list in the manner of Python, whose bracket was read."""
        while (call := (yield from self.python_call())) is not None and self.call(*call):
            self.keep()
            yield from self.spaces()
            if (yield from self.accept("]")):
                return True
            if not (yield from self.accept(",")):
                return self.at_end
            yield from self.spaces()
            if (yield from self.accept("]")):
                return True
        return False

    def _known_name(self) -> Reading[str | None]:
        """The name of a function of the request, and what begins its arguments. None: another text
        comes."""
        name = ""
        while True:
            character = yield from self.peek()
            if character == "(" and name in self.functions:
                self.at += 1
                return name
            name += character
            if not character or not any(function.startswith(name) for function in self.functions):
                return None
            self.at += 1

    def python_call(self) -> Reading[tuple[str, str] | None]:
        """Reads a call as (name, arguments). None: the next text is not a call."""
        self.named = None
        name = yield from self._known_name()
        if name is None:
            return None
        self.named = name
        arguments = yield from self._arguments()
        if arguments is None or not is_readable(arguments):
            return None
        self.named = None
        return name, arguments

    def _arguments(self) -> Reading[str | None]:
        """The JSON of the arguments up to the parenthesis that ends them, which the end of an
        answer may lack. None: they are malformed."""
        written: list[str] = []
        yield from self.spaces()
        while not (yield from self.accept(")")):
            if self.at_end and written and not self.cut:
                break
            key = yield from self.word(("=", ":", ",", ")"))
            key = None if key is None else key.strip("\"'")
            if key is None or not key.isidentifier() or (yield from self.accept_any("=:")) is None:
                return None
            yield from self.spaces()
            value = yield from self._value(0)
            if value is None:
                return None
            written.append(f"{dumps(key)}: {value}")
            yield from self.spaces()
            if (
                not (yield from self.accept(","))
                and not (yield from self.comes((")",)))
                and not self.at_end
            ):
                return None
            yield from self.spaces()
        return f"{{{', '.join(written)}}}"

    def _value(self, depth: int) -> Reading[str | None]:
        """The JSON of a literal. None: it is none."""
        first = yield from self.peek()
        if depth > MAX_DEPTH or not first:
            return None
        if first in "'\"":
            text = yield from self._string()
            return None if text is None else dumps(text)
        for opening, closing in ("[]", "()"):
            if first == opening:
                self.at += 1
                return (yield from self._items(closing, depth))
        if first == "{":
            self.at += 1
            return (yield from self._mapping(depth))
        word = ""
        while (character := (yield from self.peek())) and character not in ",)]}: \n\t":
            word += character
            self.at += 1
            if len(word) > 400:
                return None
        # The end of the text may have cut it.
        return None if self.at_end and self.cut else literal(word)

    def _items(self, closing: str, depth: int) -> Reading[str | None]:
        items: list[str] = []
        yield from self.spaces()
        while not (yield from self.accept(closing)):
            value = yield from self._value(depth + 1)
            if value is None:
                return None
            items.append(value)
            yield from self.spaces()
            if not (yield from self.accept(",")) and (yield from self.peek()) != closing:
                return None
            yield from self.spaces()
        return f"[{', '.join(items)}]"

    def _mapping(self, depth: int) -> Reading[str | None]:
        items: list[str] = []
        yield from self.spaces()
        while not (yield from self.accept("}")):
            key = (yield from self._string()) if (yield from self.peek()) in ("'", '"') else None
            yield from self.spaces()
            if key is None or not (yield from self.accept(":")):
                return None
            yield from self.spaces()
            value = yield from self._value(depth + 1)
            if value is None:
                return None
            items.append(f"{dumps(key)}: {value}")
            yield from self.spaces()
            if not (yield from self.accept(",")) and (yield from self.peek()) != "}":
                return None
            yield from self.spaces()
        return f"{{{', '.join(items)}}}"

    def _string(self) -> Reading[str | None]:
        quote = yield from self.accept_any(("'''", '"""'))
        if quote is None:
            quote = yield from self.peek()
            self.at += 1
        read: list[str] = []
        while True:
            mark = yield from self.until((quote, "\\"), read.append)
            if mark == quote:
                return "".join(read)
            if mark is None:
                return None
            character = yield from self.peek()
            self.at += 1
            if character in _CODES:
                code = ""
                while (
                    len(code) < _CODES[character]
                    and (digit := (yield from self.peek()))
                    and digit in "0123456789abcdefABCDEF"
                ):
                    code += digit
                    self.at += 1
                if len(code) < _CODES[character] or int(code, 16) > 0x10FFFF:
                    return None
                read.append(chr(int(code, 16)))
            elif character in ("'", '"', "\\") or character in _ESCAPES:
                read.append(_ESCAPES.get(character, character))
            else:
                read.append(f"\\{character}")


class MarkedPythonParser(PythonCalls, MarkedCalls):
    """Reads calls between two marks, in a list or one after the other; as JSON too."""

    def __init__(self, opens: str, closes: str, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__(tools)
        self.opens = (opens,)
        self.closes = (closes,)

    def read_calls(self, mark: str) -> Reading[bool]:
        yield from self.spaces()
        is_list = yield from self.accept("[")
        yield from self.spaces()
        if (yield from self.comes(("{",))):
            done = yield from self.json_calls(is_list=is_list)
        elif is_list:
            done = yield from self.python_list()
        else:
            done = yield from self._lines()
        if done:
            yield from self.spaces()
            yield from self.close(self.closes[0])
        return done

    def _lines(self) -> Reading[bool]:
        """Calls one after the other, as far as there are some."""
        done = False
        while (call := (yield from self.python_call())) is not None and self.call(*call):
            done = True
            self.keep()
            yield from self.spaces()
            yield from self.accept_any(",;")
            yield from self.spaces()
            if self.at_end or (yield from self.comes(self.closes)):
                break
        return done


class MarkedPythonFormat(AnswerFormat):
    """A format whose calls are in the manner of Python between marks. A family is a subclass."""

    finds = ("tool_calls",)
    keeps_special_tokens = True
    marks: ClassVar[tuple[str, str]]
    """Texts before and after all calls."""
    separator: ClassVar[str] = ", "
    """Text between calls."""

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return refusal(template, (cls.marks[0].strip("[\n"),), ())

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        begin, end = self.marks
        return MarkedPythonParser(begin.strip("[\n"), end.strip("]\n"), tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        begin, end = self.marks
        listed = python_calls(tools, parallel=parallel, separator=self.separator)
        if not required:
            return amid_text(begin.strip("[\n"), begin, listed, end)
        return sequence(text(begin), listed, text(end))


class Lfm2Format(MarkedPythonFormat):
    """LFM2: <|tool_call_start|>[f(key="value")]<|tool_call_end|>."""

    marks = ("<|tool_call_start|>[", "]<|tool_call_end|>")


class Olmo3Format(MarkedPythonFormat):
    """OLMo 3: <function_calls> around calls, each on a line."""

    marks = ("<function_calls>\n", "\n</function_calls>")
    separator = "\n"


_MOST_OPTIONAL = 16
"""Arguments that may all be absent and still are held to their schemas. Each may be the first, so
that the structure grows with their square."""


def python_calls(
    tools: Sequence[Mapping[str, Any]], *, parallel: bool, separator: str = ", "
) -> Structure:
    """The structure of calls such as f(a=1, b="x"). Values are JSON, which is read as Python is."""
    return calls(
        tools,
        lambda name: f"{name}(",
        ")",
        parallel=parallel,
        separator=separator,
        content=_arguments_of,
    )


def _arguments_of(schema: dict[str, Any]) -> Structure:
    """The structure of a call's arguments: those that are required, then any of the others, in the
    schema's order."""
    schemas = Schemas(schema)
    whole = schemas.merged(schemas.root)
    properties = whole.get("properties")
    if not isinstance(properties, Mapping):
        return ANY_TEXT
    names = whole.get("required")
    listed = [name for name in names if name in properties] if isinstance(names, list) else []
    required = [name for name in properties if name in listed and name.isidentifier()]
    others = [name for name in properties if name not in listed and name.isidentifier()]

    def argument(name: str, before: str) -> Structure:
        return tag(f"{before}{name}=", json_value(schemas.alone(properties[name])), "")

    def rest(names: Sequence[str]) -> list[Structure]:
        return [choice(argument(name, ", "), text("")) for name in names]

    if required:
        first, *more = required
        return sequence(
            argument(first, ""), *(argument(name, ", ") for name in more), *rest(others)
        )
    if not others:
        return text("")
    if len(others) > _MOST_OPTIONAL:
        return ANY_TEXT
    firsts = (
        sequence(argument(name, ""), *rest(others[at + 1 :])) for at, name in enumerate(others)
    )
    return choice(*firsts, text(""))
