"""Reasoning between two marks, before the content."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from toolkit_lm.renderer import AnswerParser

from toolkit_lm_parsers.marks import MarkedReasoning, Marks
from toolkit_lm_parsers.reading import Reading
from toolkit_lm_parsers.scanning import ScanParser
from toolkit_lm_parsers.structures import ANY_TEXT, Structure, choice, sequence, tag, text

_BAR = "\N{FULLWIDTH VERTICAL LINE}"
CALL_MARKS = (
    "<tool_call>",
    "<tool_calls>",
    "<function=",
    "<function_calls>",
    "<minimax:tool_call>",
    "<seed:tool_call>",
    "<longcat_tool_call>",
    "<TOOLCALL>",
    "[TOOL_CALLS]",
    "<|tool_call>",
    "<|tool_call_start|>",
    "<|tool_calls_section_begin|>",
    "<|tools_prefix|>",
    "<|START_ACTION|>",
    "<|open|>tools<|sep|>",
    "<|tool_call:start|>",
    "]<]minimax[>[<tool_call>",
    f"<{_BAR}DSML{_BAR}",
    f"<{_BAR}tool_calls_begin",
    f"<{_BAR}tool\N{LOWER ONE EIGHTH BLOCK}call",
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
        self,
        start: str,
        end: str,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_begun: bool,
        around_content: tuple[str, ...] = (),
    ) -> None:
        """`around_content`: marks beside content, which are left out."""
        super().__init__(tools)
        self._start = start
        self._end = end
        self._is_begun = is_begun
        self._around_content = around_content
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
        if not self._around_content:
            yield from self.rest()
        while not self.at_end:
            mark = yield from self.until(self._around_content, self.say)
            if mark and not self.content.has_any:
                # White space beside a mark is the mark's.
                self.content.starts = True

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
    after_end = "\n\n"
    """Text between reasoning and what follows."""
    around_content: ClassVar[tuple[str, ...]] = ()
    """Marks beside the content after reasoning, which are left out."""
    writes_around = False
    """Content stands between the first two of these marks, without reasoning, too."""

    @classmethod
    def refuses(cls, template: str) -> str | None:
        marks = (cls.end, *cls.around_content[:1])
        return next((f"the chat template writes no {m}" for m in marks if m not in template), None)

    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        return ThinkParser(
            self.start,
            self.end,
            tools,
            is_begun=prompt_end.rstrip().endswith(self.start.rstrip()),
            around_content=self.around_content,
        )

    def after_reasoning(
        self, structure: Structure, template_kwargs: Mapping[str, Any]
    ) -> Structure:
        if any(template_kwargs.get(name) is False for name in _SWITCHES):
            return structure
        # The end mark alone ends the reasoning, so that nothing but the structure can follow it.
        begun, written = (
            sequence(tag(start, ANY_TEXT, self.end), text(self.after_end), structure)
            for start in ("", self.start)
        )
        return begun if self._begins_in_prompt() else choice(written, structure)

    def content(self, structure: Structure) -> Structure:
        if not self.writes_around:
            return structure
        begin, end = self.around_content[:2]
        return tag(begin, structure, end)

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
    after_end = ""


class SeedThinkFormat(ThinkFormat):
    """Seed-OSS."""

    start = "<seed:think>"
    end = "</seed:think>"


class GemmaThinkFormat(ThinkFormat):
    """Gemma 4: its channel of thoughts."""

    keeps_special_tokens = True
    start = "<|channel>thought\n"
    end = "<channel|>"
    after_end = ""

    @classmethod
    def refuses(cls, template: str) -> str | None:
        return (
            None
            if "<|channel>" in template and cls.end in template
            else f"the chat template writes no {cls.end}"
        )


class AnswerThinkFormat(ThinkFormat):
    """Hunyuan A13B: <think> and </think>, then the content in <answer> and </answer>."""

    around_content = ("<answer>", "</answer>")


class ResponseThinkFormat(ThinkFormat):
    """ERNIE 4.5: <think> and </think>, then the content in <response> and </response>."""

    around_content = ("<response>", "</response>")


class CohereThinkFormat(ThinkFormat):
    """Command A Reasoning and newer: its parts for thoughts and for the response."""

    keeps_special_tokens = True
    start = "<|START_THINKING|>"
    end = "<|END_THINKING|>"
    after_end = ""
    writes_around = True
    around_content = (
        "<|START_RESPONSE|>",
        "<|END_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
    )


class KimiThinkFormat(ThinkFormat):
    """Kimi K3: its channels for thoughts and for the response."""

    keeps_special_tokens = True
    start = "<|open|>think<|sep|>"
    end = "<|close|>think<|sep|>"
    after_end = ""
    writes_around = True
    around_content = (
        "<|open|>response<|sep|>",
        "<|close|>response<|sep|>",
        "<|close|>message<|sep|>",
    )


class ApertusThinkFormat(ThinkFormat):
    """Apertus: its inner thoughts."""

    keeps_special_tokens = True
    start = "<|inner_prefix|>"
    end = "<|inner_suffix|>"
    after_end = ""


class MiniMaxThinkFormat(ThinkFormat):
    """MiniMax M3."""

    start = "<mm:think>"
    end = "</mm:think>"


class SolarThinkFormat(ThinkFormat):
    """Solar Open 2."""

    keeps_special_tokens = True
    start = "<|think:start|>"
    end = "<|think:end|>"
    after_end = ""


class GraniteThinkFormat(ThinkFormat):
    """Granite 3.2: sentences that announce thoughts and response."""

    start = "Here is my thought process:"
    end = "Here is my response:"
