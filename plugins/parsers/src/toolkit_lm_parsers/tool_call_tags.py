"""Calls between <tool_call> and </tool_call>: of Hermes and Qwen as JSON, of Qwen3-Coder as XML."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerFormat, AnswerParser

from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.structures import Structure, calls
from toolkit_lm_parsers.tagged import Layout, TaggedCalls, TaggedFormat

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
QWEN_CODER = Layout(
    f"{_OPEN}\n<function={{name}}>\n",
    "<parameter={name}>\n{value}\n</parameter>\n",
    f"</function>\n{_CLOSE}",
)
_FUNCTION = QWEN_CODER.function.begin


class ToolCallTagParser(TaggedCalls):
    """Reads both: a model of one kind that has seen the other may write it."""

    keeps_first_ends = True

    def __init__(
        self, tools: Sequence[Mapping[str, Any]] = (), *, opens: tuple[str, ...] = (_OPEN,)
    ) -> None:
        super().__init__(tools)
        self.set_layout(QWEN_CODER)
        self.opens = opens

    def read_calls(self, mark: str) -> Reading[bool]:
        if mark != _FUNCTION:
            yield from self.spaces()
            is_xml = yield from self.accept(_FUNCTION)
        else:
            is_xml = True
        done = yield from (self.tagged_call() if is_xml else self.json_calls())
        if done:
            yield from self.spaces()
            yield from self.close(_CLOSE)
        return done


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


class QwenCoderFormat(TaggedFormat):
    """Qwen3-Coder and Qwen 3.5:
    <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

    layout = QWEN_CODER
    shown_by = (_FUNCTION, QWEN_CODER.key_begin)
    not_shown_by = ("<seed:tool_call>",)

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return ToolCallTagParser(tools, opens=(_OPEN, _FUNCTION))
