"""DeepSeek's calls: V3, R1 and V3.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.structures import Structure, amid_text, calls, sequence, text

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_LOW = "\N{LOWER ONE EIGHTH BLOCK}"
_WRITTEN = ((_BAR, _LOW), (_BAR, "_"), (_BAR, " "), (_BAR, "\\_"), ("|", "_"))
"""Bars and what stands between words. The others are what distilled models write, with letters."""


def _marks(*words: str) -> tuple[str, ...]:
    return tuple(f"<{bar}{between.join(words)}{bar}>" for bar, between in _WRITTEN)


_CALLS = _marks("tool", "calls", "begin")
_END_CALLS = _marks("tool", "calls", "end")
_CALL = _marks("tool", "call", "begin")
_END_CALL = _marks("tool", "call", "end")
_SEP = _marks("tool", "sep")
_FENCE = "```"
_TYPE = "function"
"""V3 writes this type in place of the name; the name comes after it."""


class DeepSeekParser(MarkedCalls):
    """V3: the type, a mark, the name, and the arguments in a code block. V3.1: the name, a mark,
    and the arguments."""

    opens = (*_CALL, *_CALLS, *_END_CALLS, *_END_CALL, *_SEP)
    ends = (*_END_CALL, *_END_CALLS, *_CALL, _FENCE)

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark not in _CALL:
            # Around all calls, or left of one: nothing of its own.
            return True
        name = yield from self.word((*_SEP, *_END_CALL, *_CALL))
        if name is None or (yield from self.accept_any(_SEP)) is None:
            return False
        yield from self.spaces()
        is_fenced = name == _TYPE and not (yield from self.comes(("{", _FENCE)))
        if is_fenced:
            name = yield from self.word((_FENCE, "\n", "{", *_END_CALL, *_CALL))
            if name is None:
                return False
            yield from self.spaces()
        if (yield from self.accept(_FENCE)):
            yield from self.accept("json")
        yield from self.spaces()
        arguments = yield from self.json_arguments(name)
        if arguments is None or not self.call(name, arguments):
            return False
        yield from self.spaces()
        yield from self.close(_FENCE)
        yield from self.close(_END_CALL[0])
        return True


class DeepSeekFormat(AnswerFormat):
    """DeepSeek V3, R1 and V3.1, by their marks."""

    finds = ("tool_calls",)
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return None if _CALL[0] in template else f"the chat template writes no {_CALL[0]}"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return DeepSeekParser(tools)

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> Structure | None:
        def begin(name: str) -> str:
            return (
                f"{_CALL[0]}{_TYPE}{_SEP[0]}{name}\n{_FENCE}json\n"
                if is_fenced
                else f"{_CALL[0]}{name}{_SEP[0]}"
            )

        is_fenced = f"{_FENCE}json" in self.template
        end = f"\n{_FENCE}{_END_CALL[0]}" if is_fenced else _END_CALL[0]
        listed = calls(tools, begin, end, parallel=parallel, separator="\n" if is_fenced else "")
        if not required:
            return amid_text(_CALLS[0], _CALLS[0], listed, _END_CALLS[0])
        return sequence(text(_CALLS[0]), listed, text(_END_CALLS[0]))
