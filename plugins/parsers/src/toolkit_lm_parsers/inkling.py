"""Inkling: blocks of thoughts, texts and calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerParser, StopScope

from toolkit_lm_parsers.json_calls import JsonCalls
from toolkit_lm_parsers.marks import MarkedReasoning, Marks
from toolkit_lm_parsers.reading import MAX_NAME, Reading
from toolkit_lm_parsers.scanning import scope_of
from toolkit_lm_parsers.structures import ANY_TEXT, Structure, calls, choice, sequence, tag
from toolkit_lm_parsers.tagged import refusal

_MODEL = "<|message_model|>"
_THINKING = "<|content_thinking|>"
_TEXT = "<|content_text|>"
_CALL = "<|content_invoke_tool_json|>"
_OTHER = ("<|content_invoke_tool_text|>", "<|content_tool_error|>")
"""Blocks that are read as texts."""
_END = "<|end_message|>"
_END_SAMPLING = "<|content_model_end_sampling|>"
_KINDS = (_THINKING, _TEXT, _CALL, *_OTHER)
_BREAKS = (_MODEL, *_KINDS, _END, _END_SAMPLING)


class InklingParser(JsonCalls):
    """Reads blocks, each of a kind. Before the kind of a call stands its function's name."""

    ends = _BREAKS
    argument_names = (*JsonCalls.argument_names, "args")

    def __init__(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tools)
        self._first_kind = next(
            (kind for kind in _KINDS if prompt_end.rstrip().endswith(kind)), None
        )
        """Kind of the block that the prompt has begun."""
        self._in_header = prompt_end.rstrip().endswith(_MODEL)
        """What comes next stands before the mark of a kind."""

    def run(self) -> Reading[None]:
        kind = self._first_kind
        while not self.at_end:
            if kind is None:
                yield from self._header()
                mark = yield from self.accept_any(_BREAKS)
                kind = mark if mark in _KINDS else None
                self._in_header = mark == _MODEL
                if mark is not None and kind is None:
                    continue
            if kind == _CALL:
                yield from self._call()
            else:
                self.separate()
                yield from self._end(self.think if kind == _THINKING else self.say)
            kind = None

    def _header(self) -> Reading[None]:
        """Reads a function's name before the mark of a kind. Another text is content."""
        self.keep()
        length = 0
        while (
            length < MAX_NAME
            and (character := (yield from self.peek()))
            and (character.isalnum() or character in "_-.")
        ):
            self.at += 1
            length += 1
        is_name = yield from self.comes(_KINDS)
        if self.is_cut and self._in_header:
            self.lacks_call |= length > 0
            self.skip()
            return
        if is_name:
            self.release()
        self.go_back()

    def _end(self, sink: Callable[[str], None]) -> Reading[None]:
        """The rest of a block. What begins the next one is its own."""
        mark = yield from self.until(_BREAKS, sink)
        if mark is not None and mark not in (_END, _END_SAMPLING):
            self.at -= len(mark)

    def _call(self) -> Reading[None]:
        """Reads a call. Text that is none becomes content."""
        self.keep()
        yield from self.spaces()
        if (yield from self.json_call()):
            yield from self.spaces()
            self.release()
        elif self.is_cut:
            self.lacks_call = True
            self.skip()
        else:
            self.separate()
            self.go_back()
        yield from self._end(self.say)


class InklingFormat(MarkedReasoning):
    """Inkling."""

    finds = ("reasoning", "tool_calls")
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return refusal(template, (_MODEL, _TEXT), ())

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return InklingParser(prompt_end, tools)

    def stop_scope(self, prompt_end: str) -> StopScope:
        return scope_of(InklingParser(prompt_end, ()))

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        called = calls(
            tools,
            lambda name: f'{name}{_CALL}{{"name": {json.dumps(name)}, "args": ',
            f"}}{_END}",
            parallel=parallel,
            separator=_MODEL,
        )
        if required:
            return called
        preamble = tag(_TEXT, ANY_TEXT, f"{_END}{_MODEL}")
        return choice(called, sequence(preamble, called), self.content(ANY_TEXT))

    def content(self, structure: Structure) -> Structure:
        return tag(_TEXT, structure, _END)

    def after_reasoning(
        self, structure: Structure, template_kwargs: Mapping[str, Any]
    ) -> Structure:
        thought = tag(_THINKING, ANY_TEXT, f"{_END}{_MODEL}")
        return choice(sequence(thought, structure), structure)

    @property
    def marks(self) -> Marks:
        next_message = f"{_END}{_MODEL}"
        return Marks(
            _THINKING,
            _END,
            repeats=True,
            forced=next_message,
            forced_again=f"{next_message}{_TEXT}",
        )
