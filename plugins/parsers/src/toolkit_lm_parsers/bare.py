"""Calls without marks: of Llama 3 as JSON, of Llama 3.2 and 4 in the manner of Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.python_calls import PythonCalls, python_calls
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.structures import Structure, calls, sequence, text

_PYTHON_TAG = "<|python_tag|>"
_PYTHON_START = "<|python_start|>"
_PYTHON_END = "<|python_end|>"
_TAGS = (_PYTHON_TAG, _PYTHON_START, _PYTHON_END)
"""Around calls: nothing of their own, and never content."""
_NAME = '{"name": '
_BEGINS = ("{", "[")
"""First characters of a call, or of a list of calls."""


class BareCallsParser(PythonCalls):
    """Finds calls of functions of the request in an answer, as JSON and in the manner of Python:
    models of both kinds write both.

    Content may come before, between and after them. What begins like a call, and is none, stays as
    it is.
    """

    only_known = True

    def run(self) -> Reading[None]:
        yield from self._first()
        while (mark := (yield from self.until((*_BEGINS, *_TAGS), self.say))) is not None:
            if mark in _TAGS:
                continue
            self.at -= len(mark)
            self.keep()
            if not (yield from self._calls_here()):
                self.give_up()
            self.release()

    def _first(self) -> Reading[None]:
        """Reads calls at the beginning of an answer. They may lack their brackets if only calls
        follow; otherwise the text merely mentions them and is content."""
        self.keep()
        yield from self.spaces()
        yield from self.accept_any(_TAGS)
        yield from self.spaces()
        found: list[tuple[str, str]] = []
        is_next = False
        while not is_next and not (found and self.at_end):
            is_next = yield from self.comes((*_BEGINS, *_TAGS))
            call = None if is_next else (yield from self.python_call())
            if call is None:
                break
            found.append(call)
            yield from self.spaces()
            yield from self.accept_any((";", ","))
            yield from self.spaces()
            yield from self.peek()
        is_over = self.at_end and bool(found)
        is_call = is_next and bool(found) and (yield from self._is_call_next())
        is_cut = self.is_cut and not is_over and (self.is_begun() or bool(found))
        if not (is_over or is_call or is_cut):
            self.go_back()
            return
        for found_call in found:
            self.call(*found_call)
        if is_cut:
            self.lacks_call = True
            self.skip()
        self.release()

    def _is_call_next(self) -> Reading[bool]:
        """Whether what comes next begins as a call does. It is not read."""
        text = ""
        while self._may_begin(text) or not text:
            character = yield from self.peek()
            self.at += len(character)
            text += character
            if not character or self._has_begun(text):
                break
        self.unread(len(text))
        return self._may_begin(text) or self._has_begun(text)

    def _calls_here(self) -> Reading[bool]:
        """One call or several, between which are commas, semicolons or nothing."""
        if (yield from self.comes(("{",))):
            done = yield from self.json_calls()
        else:
            yield from self.accept("[")
            yield from self.spaces()
            is_json = yield from self.comes(("{",))
            done = yield from (self.json_calls(is_list=True) if is_json else self.python_list())
        if done:
            yield from self._separator()
        return done

    def _separator(self) -> Reading[None]:
        """Skips the separator between two calls, if another call may follow."""
        self.keep()
        yield from self.spaces()
        yield from self.accept_any((";", ","))
        yield from self.spaces()
        if (yield from self.comes((*_BEGINS, *_TAGS))) or self.at_end:
            self.release()
        self.go_back()

    def give_up(self) -> None:
        if self.is_cut and self.is_begun():
            self.lacks_call = True
            self.skip()
        else:
            self.say(self.read_again((*_BEGINS, *_TAGS), start=1))

    def is_begun(self) -> bool:
        return self.named is not None or self.num_calls > 0 or self._may_begin(self.left)

    def _may_begin(self, text: str) -> bool:
        """Whether a text is the beginning of a call to a function of the request, without white
        space, which a tag may come before."""
        plain = _plain(text)
        for tag in _TAGS:
            if len(plain) > 1 and tag.startswith(plain):
                return True
            plain = plain.removeprefix(tag)
        return bool(plain) and any(call.startswith(plain) for call in self._beginnings())

    def _has_begun(self, text: str) -> bool:
        """Whether a text has all of the beginning of a call, or a tag."""
        return _plain(text).startswith((*self._beginnings(), *_TAGS))

    def _beginnings(self) -> list[str]:
        before = ("{", '{"type":"function",')
        names = [
            f'{opening}{first}"name":"{name}'
            for name in self.functions
            for first in before
            for opening in ("", "[")
        ]
        return [*names, *(f"[{name}(" for name in self.functions)]


def _plain(text: str) -> str:
    return "".join(text.split()).replace("'", '"')


class LlamaJsonFormat(AnswerFormat):
    """Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        is_llama = '"parameters"' in template and (
            "<|python_tag|>" in template or "ipython" in template
        )
        return None if is_llama else "the chat template asks for no JSON with name and parameters"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return BareCallsParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        return calls(
            tools,
            lambda name: f'{_NAME}{json.dumps(name)}, "parameters": ',
            "}",
            parallel=parallel,
            separator="; ",
            trigger=None if required else f'{_NAME}"',
        )


class PythonicFormat(AnswerFormat):
    """Llama 3.2 and Llama 4: [name(key=value, ...), ...]."""

    finds = ("tool_calls",)

    @classmethod
    def refuses(cls, template: str) -> str | None:
        is_pythonic = _PYTHON_START in template or "[func_name1(params_name1=" in template
        return (
            None if is_pythonic else "the chat template asks for no calls in the manner of Python"
        )

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return BareCallsParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        # A bracket may begin any text.
        listed = python_calls(tools, parallel=parallel)
        return sequence(text("["), listed, text("]")) if required else None
