"""Reasoning between two marks, before the content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from toolkit_lm.renderer import AnswerParser

from toolkit_lm_parsers.marks import MarkedReasoning, Marks
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.scanning import ScanParser
from toolkit_lm_parsers.structures import ANY_TEXT, Structure, choice, sequence, tag, text

CALL_MARKS = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<|tool_call>",
    "<\N{FULLWIDTH VERTICAL LINE}tool\N{LOWER ONE EIGHTH BLOCK}call",
)
"""Beginnings of calls in the formats of reasoning models."""
_SWITCHES = ("enable_thinking", "thinking")
"""Names of templates for whether there is to be reasoning."""


class ThinkParser(ScanParser):
    """Reads reasoning where the answer begins with it, or the prompt has begun it.

    A model may call a tool without having ended its reasoning. What looks like a call is reasoning
    where its end comes after all, and content where the answer ends without: whether it is a call
    is another parser's business.
    """

    def __init__(
        self, start: str, end: str, tools: Sequence[Mapping[str, Any]] = (), *, is_begun: bool
    ) -> None:
        super().__init__(tools)
        self._start = start
        self._end = end
        self._is_begun = is_begun
        self.content.ends = False

    def run(self) -> Reading[None]:
        self.keep()
        yield from self.spaces()
        # A model may write again what the prompt has.
        if (yield from self.accept(self._start)) or self._is_begun:
            self.release()
            yield from self._reasoning_to_its_end()
            self.end_reasoning()
        self.go_back()
        yield from self.rest()

    def _reasoning_to_its_end(self) -> Reading[None]:
        marks = (self._end, *(CALL_MARKS if self.functions else ()))
        mark = yield from self.until(marks, self.think)
        if mark in (None, self._end):
            return
        self.at -= len(mark)
        self.keep()
        held: list[str] = []
        if (yield from self.until((self._end,), held.append)) or self.cut:
            self.think("".join(held))
            self.release()


class ThinkFormat(MarkedReasoning):
    """<think> and </think>: Qwen3, DeepSeek-R1 and many others."""

    finds = ("reasoning",)
    start = "<think>"
    end = "</think>"

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return None if cls.end in template else f"the chat template writes no {cls.end}"

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return ThinkParser(
            self.start, self.end, tools, is_begun=prompt_end.rstrip().endswith(self.start.rstrip())
        )

    def after_reasoning(
        self, structure: Structure, template_kwargs: Mapping[str, Any]
    ) -> Structure:
        if any(template_kwargs.get(name) is False for name in _SWITCHES):
            return structure
        # The end mark alone ends the reasoning, so that nothing but the structure can follow it.
        begun, written = (
            sequence(tag(start, ANY_TEXT, self.end), text("\n\n"), structure)
            for start in ("", self.start)
        )
        return begun if self._begins_in_prompt() else choice(written, structure)

    @property
    def marks(self) -> Marks:
        return Marks(self.start, self.end)

    def _begins_in_prompt(self) -> bool:
        """The template's last lines, which begin an answer, begin reasoning, too, and do not end it
        at once."""
        _, _, last = self.template.rpartition("add_generation_prompt")
        parts = last.split(self.start)[1:]
        return any(self.end not in part[:40] for part in parts)


class BegunThinkFormat(ThinkFormat):
    """DeepSeek-R1 and others that begin to reason without a mark, though their prompt has none. It
    is chosen by name."""

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return (
            "an answer that begins with reasoning without a mark cannot be told by its template: "
            "name this format"
        )

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return ThinkParser(self.start, self.end, tools, is_begun=True)

    @property
    def marks(self) -> Marks:
        return Marks("", self.end)

    def _begins_in_prompt(self) -> bool:
        return True


class MistralThinkFormat(ThinkFormat):
    """[THINK] and [/THINK]: Magistral and Mistral's newer models."""

    keeps_special_tokens = True
    start = "[THINK]"
    end = "[/THINK]"


class SeedThinkFormat(ThinkFormat):
    """Seed-OSS."""

    start = "<seed:think>"
    end = "</seed:think>"


class GemmaThinkFormat(ThinkFormat):
    """Gemma 4: its channel of thoughts."""

    keeps_special_tokens = True
    start = "<|channel>thought\n"
    end = "<channel|>"

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return (
            None
            if "<|channel>" in template and cls.end in template
            else f"the chat template writes no {cls.end}"
        )
