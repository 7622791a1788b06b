"""Calls without marks: of Llama 3 as JSON, of Llama 3.2 and 4 in the manner of Python."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import JsonCalls, dumps
from toolkit_lm_parsers.json_scanner import MAX_DEPTH, is_literal
from toolkit_lm_parsers.scanning import Reading
from toolkit_lm_parsers.structures import Structure, calls

_PYTHON_TAG, _PYTHON_START, _PYTHON_END = "<|python_tag|>", "<|python_start|>", "<|python_end|>"
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}


class LlamaJsonParser(JsonCalls):
    """An answer is all calls, or none: they begin it, and name functions of the request. Semicolons separate them."""

    only_known = True

    def run(self) -> Reading[None]:
        self.keep()
        yield from self.spaces()
        yield from self.accept(_PYTHON_TAG)
        yield from self.spaces()
        while (yield from self.json_calls()):
            self.keep()
            yield from self.spaces()
            if not (yield from self.accept(";")):
                break
            yield from self.spaces()
        self.give_up("")
        yield from self.rest()

    def begins_call(self, text: str) -> bool:
        before = ("{", '{"type":"function",')
        return _begins(
            text,
            _PYTHON_TAG,
            (f'{opening}{first}"name":{json.dumps(name)}' for name in self.functions for first in before for opening in ("", "[")),
        )


class LlamaJsonFormat(AnswerFormat):
    """Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        is_llama = '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template)
        return None if is_llama else "the chat template asks for no JSON with name and parameters"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return LlamaJsonParser(tools)

    def structure(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True) -> Structure | None:
        if not required:
            return None
        return calls(tools, lambda name: f'{{"name": {json.dumps(name)}, "parameters": ', "}", parallel=parallel, separator="; ")


class PythonicParser(JsonCalls):
    """An answer is a list of calls, or none: [f(a=1), g(b="x")]. Values are literals, read here."""

    only_known = True

    def run(self) -> Reading[None]:
        self.keep()
        yield from self.spaces()
        yield from self.accept(_PYTHON_START)
        yield from self.spaces()
        if (yield from self.accept("[")):
            while (yield from self._call()):
                self.keep()
                yield from self.spaces()
                mark = yield from self.accept_any((",", "]"))
                if mark != ",":
                    if mark:
                        self.keep()
                        yield from self.spaces()
                        yield from self.close(_PYTHON_END)
                        self.keep()
                    break
                yield from self.spaces()
        self.give_up("")
        yield from self.rest()

    def begins_call(self, text: str) -> bool:
        return _begins(text, _PYTHON_START, (f"[{name}(" for name in self.functions))

    def _call(self) -> Reading[bool]:
        name = yield from self.word(("(",))
        if name is None or not self._is_callable(name) or not (yield from self.accept("(")):
            return False
        read = ["{"]
        whole = yield from self._arguments(read)
        if not whole and not self.is_cut:
            return False
        self.begin_call(name)
        self.add_arguments("".join(read))
        if whole:
            self.end_call()
        return whole

    def _arguments(self, read: list[str]) -> Reading[bool]:
        yield from self.spaces()
        while not (yield from self.accept(")")):
            key = yield from self.word(("=", ",", ")"))
            if key is None or not key.isidentifier() or not (yield from self.accept("=")):
                return False
            yield from self.spaces()
            value = yield from self._value(0)
            if value is None:
                return False
            read.append(f"{', ' if len(read) > 1 else ''}{dumps(key)}: {value}")
            yield from self.spaces()
            if not (yield from self.accept(",")) and (yield from self.peek()) != ")":
                return False
            yield from self.spaces()
        read.append("}")
        return True

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
        word = _WORDS.get(word, word)
        return word if is_literal(word) and not self.at_end else None

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
                while len(code) < _CODES[character] and (digit := (yield from self.peek())) and digit in "0123456789abcdefABCDEF":
                    code += digit
                    self.at += 1
                if len(code) < _CODES[character] or int(code, 16) > 0x10FFFF:
                    return None
                read.append(chr(int(code, 16)))
            elif character in ("'", '"', "\\") or character in _ESCAPES:
                read.append(_ESCAPES.get(character, character))
            else:
                read.append(f"\\{character}")


class PythonicFormat(AnswerFormat):
    """Llama 3.2 and Llama 4: [name(key=value, ...), ...]."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        is_pythonic = _PYTHON_START in template or "[func_name1(params_name1=" in template
        return None if is_pythonic else "the chat template asks for no calls in the manner of Python"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return PythonicParser(tools)


def _begins(text: str, mark: str, calls: Iterable[str]) -> bool:
    """Whether a text is the beginning of one of some calls, without white space, which a mark may come before."""
    plain = "".join(text.split())
    return mark.startswith(plain) or any(call.startswith(plain.removeprefix(mark)) for call in calls)
