"""Answer formats: what in an answer is reasoning, what are tool calls, and what is content. Needs
no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from toolkit_lm.renderer.contract import Renderer

_PROMPT_END = 64
"""Tokens of the prompt that show what it has begun of the answer."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A tool call that is new in an answer, or the next piece of one that has begun in it."""

    index: int
    """Of the call: 0 for the answer's first."""
    name: str
    """Of the function; empty in all pieces but a call's first."""
    arguments: str
    """The JSON text of an object, or a piece of it. All pieces of a call together are the text."""


class AnswerDelta(NamedTuple):
    """What is new in an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(ABC):
    """Tells the parts of one answer from each other, as its text comes.

    What it gives depends on the text, and not on how it is cut: the parts of all deltas together
    are equal for a whole answer and for any stream of it. It holds back only what may begin a mark,
    and a tool call until it is whole: one that a limit cuts, or that turns out to be malformed, can
    be executed by nobody. It raises nothing, whatever a model writes: what is no call is content.
    """

    in_pieces = False
    """Set before the first `push` where a grammar holds the answer to whole calls: then a call may
    come in pieces, before it is whole.

    The last piece comes when the call is whole, and without it the arguments are no JSON. A parser
    may give whole calls all the same.
    """

    @abstractmethod
    def push(self, text: str) -> AnswerDelta:
        """What the text adds, of what came before too."""

    @abstractmethod
    def finish(self, *, cut: bool) -> AnswerDelta:
        """What was held back. Ends the answer.

        `cut`: the model did not end it. A call in the middle of which it was cut is left out.
        """

    @property
    def num_held_back(self) -> int:
        """Characters at the end of what was pushed that may begin a mark, and are no part of what
        was given."""
        return 0

    @property
    @abstractmethod
    def calls_tools(self) -> bool:
        """After `finish`: there are tool calls, and none was cut."""


class StopScope(ABC):
    """Tells in which parts of one answer's text stop texts count, as the text comes."""

    @abstractmethod
    def push(self, text: str) -> list[tuple[int, bool]]:
        """The next parts of which that is known: their lengths in characters, and whether stop
        texts count in them.

        They follow those that were given before. What is not known yet comes later.
        """

    @abstractmethod
    def finish(self) -> list[tuple[int, bool]]:
        """The last parts. Ends the answer."""


class ContentScope(StopScope):
    """Stop texts count in what a parser calls content, and not in reasoning, marks and white space
    between them."""

    def __init__(self, parser: AnswerParser) -> None:
        """`parser`: a new one, for the answer."""
        self._parser = parser
        self._unknown: list[str] = []
        """Characters of which it is not known yet what they are."""

    def push(self, text: str) -> list[tuple[int, bool]]:
        parts: list[tuple[int, bool]] = []
        # One by one: what the parser gives for a character is the last of its kind in the text, and
        # so its place is known.
        for character in text:
            self._unknown.append(character)
            self._sort(self._parser.push(character), parts)
        return parts

    def finish(self) -> list[tuple[int, bool]]:
        parts: list[tuple[int, bool]] = []
        self._sort(self._parser.finish(cut=False), parts)
        _add(parts, len(self._unknown), False)
        return parts

    def _sort(self, delta: AnswerDelta, parts: list[tuple[int, bool]]) -> None:
        if not any(delta):
            return
        end = len(self._unknown) - self._parser.num_held_back
        text = "".join(self._unknown[:end])
        begin = -1
        content = delta.content
        if content:
            begin = text.rfind(content)
            if begin < 0:
                # Between paragraphs, parsers write white space of their own.
                begin = text.rfind(content := content.lstrip())
        if begin < 0:
            _add(parts, end, False)
        else:
            end = begin + len(content)
            _add(parts, begin, False)
            _add(parts, len(content), True)
        del self._unknown[:end]


def _add(parts: list[tuple[int, bool]], length: int, counts: bool) -> None:
    if parts and parts[-1][1] is counts:
        parts[-1] = (parts[-1][0] + length, counts)
    elif length:
        parts.append((length, counts))


class ReasoningCounter(ABC):
    """Counts the tokens of one answer's reasoning, without those of its marks."""

    num_tokens = 0
    """So far. Those of an end mark that is not whole count until it is."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> None:
        """Goes on by these tokens of the answer."""


class AnswerFormat(ABC):
    """One way of writing reasoning, tool calls, or both. An engine has one instance, whose methods
    are called from several threads."""

    finds: ClassVar[tuple[str, ...]]
    """"reasoning", "tool_calls", or both."""
    keeps_special_tokens: ClassVar[bool] = False
    """Its marks are special tokens: they must be in the text."""

    call_id_length: ClassVar[int] = 29
    """Characters of calls' ids: templates may refuse others."""

    def __init__(self, template: str) -> None:
        """`template`: the renderer's `chat_template_source`."""
        self.template = template

    @classmethod
    @abstractmethod
    def refuses(cls, template: str) -> str | None:
        """Why answers to prompts of this template are not of this format; None when they are. For a
        choice by the template."""

    @abstractmethod
    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        """For one answer. `tools`: those of the request, as OpenAI has them. None: it calls none.

        `prompt_end`: the last characters before the answer, which may begin it.
        """

    def stop_scope(self, prompt_end: str) -> StopScope:
        """For one answer: stop texts count in its content. `prompt_end`: as of `parser`."""
        return ContentScope(self.parser(prompt_end, ()))

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> dict[str, Any] | None:
        """An answer that calls one of `tools`, several where `parallel`: a `format` of structural
        tags. None: that cannot be stated.

        Not `required`: any text, in which what begins a call is one.
        """
        return None

    def after_reasoning(
        self, structure: dict[str, Any], template_kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The structure of an answer in which reasoning, where there is some, comes before
        `structure`."""
        return structure

    def reasoning_counters(
        self, renderer: Renderer
    ) -> Callable[[Sequence[int]], ReasoningCounter] | None:
        """What makes the counter of an answer, by its prompt's tokens; None: reasoning is not
        counted.

        It may take a part of a second, where the whole vocabulary is looked at.
        """
        return None


def prompt_end(renderer: Renderer, token_ids: Sequence[int]) -> str:
    """The last characters of a prompt of these tokens, for `AnswerFormat.parser`."""
    return renderer.decode(token_ids[-_PROMPT_END:])
