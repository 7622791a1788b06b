"""DeepSeek's calls: V3, R1 and V3.1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.json_calls import MarkedCalls
from toolkit_lm_parsers.scanning import Reading
from toolkit_lm_parsers.structures import Structure, calls, sequence, text

_BAR, _LOW = "\N{FULLWIDTH VERTICAL LINE}", "\N{LOWER ONE EIGHTH BLOCK}"


def _mark(*words: str) -> str:
    return f"<{_BAR}{_LOW.join(words)}{_BAR}>"


_CALLS, _END_CALLS = _mark("tool", "calls", "begin"), _mark("tool", "calls", "end")
_CALL, _END_CALL, _SEP = _mark("tool", "call", "begin"), _mark("tool", "call", "end"), _mark("tool", "sep")
_FENCE = "```"


class DeepSeekParser(MarkedCalls):
    """V3: the type, a mark, the name, and the arguments in a code block. V3.1: the name, a mark, and the arguments."""

    opens = (_CALL, _CALLS, _END_CALLS)

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark != _CALL:
            # Around all calls: nothing of its own.
            return True
        name = yield from self.word((_SEP,))
        if name is None or not (yield from self.accept(_SEP)):
            return False
        self.named = None
        is_fenced = (yield from self.peek()) != "{"
        if is_fenced:
            name = yield from self.word((_FENCE, "\n", "{"))
            if name is None:
                return False
            yield from self.spaces()
            yield from self.accept(f"{_FENCE}json")
            yield from self.spaces()
        if not (yield from self.json_arguments(name, [])):
            return False
        self.end_call()
        yield from self.spaces()
        if is_fenced:
            yield from self.close(_FENCE)
        yield from self.close(_END_CALL)
        return True


class DeepSeekFormat(AnswerFormat):
    """DeepSeek V3, R1 and V3.1, by their marks."""

    finds = ("tool_calls",)
    keeps_special_tokens = True

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return None if _CALL in template else f"the chat template writes no {_CALL}"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return DeepSeekParser(tools)

    def structure(self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True) -> Structure | None:
        def begin(name: str) -> str:
            return f"{_CALL}function{_SEP}{name}\n{_FENCE}json\n" if is_fenced else f"{_CALL}{name}{_SEP}"

        if not required:
            return None
        is_fenced = f"{_FENCE}json" in self.template
        end = f"\n{_FENCE}{_END_CALL}" if is_fenced else _END_CALL
        listed = calls(tools, begin, end, parallel=parallel, separator="\n" if is_fenced else "")
        return sequence(text(_CALLS), listed, text(_END_CALLS))
