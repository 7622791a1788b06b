"""Answer formats: separation of reasoning, tool calls and content in answers. Needs no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from toolkit_lm.renderer.contract import Renderer

_PROMPT_END = 64
"""Number of the prompt's last tokens that may hold the beginning of the answer."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A new tool call of an answer, or the next piece of one."""

    index: int
    """Index of the call; 0 is the answer's first."""
    name: str
    """Name of the function; empty in all pieces of a call but the first."""
    arguments: str
    """The JSON text of an object, or a piece of it. The pieces of a call, joined, are the text."""
    id: str = ""
    """The id that the model wrote; empty in pieces of a call but the first, and if it wrote none.
    """


class AnswerDelta(NamedTuple):
    """New parts of an answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class AnswerParser(ABC):
    """Separates the parts of one answer as its text arrives.

    The result depends on the text, and not on its division: the parts of all deltas together are
    equal for a whole answer and for any stream of it. The parser holds back only what may begin a
    mark, and a tool call until it is whole. A call that a limit cuts, or that turns out to be
    malformed, cannot be executed. It raises nothing, whatever a model writes: text that is not a
    call is content.
    """

    in_pieces = False
    """Set before the first `push` if a grammar ensures whole calls. A call may then be returned in
    pieces, before it is whole.

    The last piece comes when the call is whole; without it the arguments are not valid JSON. A
    parser may still return whole calls.
    """

    @abstractmethod
    def push(self, text: str) -> AnswerDelta:
        """Returns the parts that become known with this text."""

    @abstractmethod
    def finish(self, *, cut: bool) -> AnswerDelta:
        """Returns the parts that were held back, and ends the answer.

        `cut`: the model did not end it. A call in the middle of which it was cut is left out.
        """

    @property
    def num_held_back(self) -> int:
        """Number of characters at the end of the pushed text that may begin a mark, and are not
        returned yet."""
        return 0

    @property
    @abstractmethod
    def calls_tools(self) -> bool:
        """After `finish`: there are tool calls, and none was cut."""


class StopScope(ABC):
    """Finds the parts of one answer's text in which stop texts apply, as the text arrives."""

    @abstractmethod
    def push(self, text: str) -> list[tuple[int, bool]]:
        """Returns the next known parts: their lengths in characters, and whether stop texts apply
        in them.

        They follow the parts returned before. Parts that are unknown yet come later.
        """

    @abstractmethod
    def finish(self) -> list[tuple[int, bool]]:
        """Returns the last parts, and ends the answer."""


class ContentScope(StopScope):
    """Stop texts apply in a parser's content, but not in reasoning, marks and white space between
    them."""

    def __init__(self, parser: AnswerParser) -> None:
        """`parser`: a new one, for the answer."""
        self._parser = parser
        self._unknown: list[str] = []
        """Characters whose part is not known yet."""

    def push(self, text: str) -> list[tuple[int, bool]]:
        parts: list[tuple[int, bool]] = []
        # One by one: what the parser returns for a character is the last of its kind in the text,
        # so its position is known.
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
    """Counts the tokens of one answer's reasoning, without its marks."""

    num_tokens = 0
    """Reasoning tokens so far. Tokens of an incomplete end mark count until it is complete."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> None:
        """Adds these tokens of the answer."""


class AnswerFormat(ABC):
    """One format of reasoning, tool calls, or both. An engine has one instance, whose methods are
    called from several threads."""

    finds: ClassVar[tuple[str, ...]]
    """Parts that the format finds: "reasoning", "tool_calls", or both."""
    keeps_special_tokens: ClassVar[bool] = False
    """The format's marks are special tokens, which must be kept in the text."""

    call_id_length: ClassVar[int] = 29
    """Number of characters of calls' ids: templates may refuse others."""

    def __init__(self, template: str) -> None:
        """`template`: the renderer's `chat_template_source`."""
        self.template = template

    @classmethod
    @abstractmethod
    def refuses(cls, template: str) -> str | None:
        """Returns why answers to prompts of this template are not in this format; None: they are.
        Used to select a format by the template."""

    @abstractmethod
    def parser(self, prompt_end: str, tools: Sequence[Mapping[str, Any]]) -> AnswerParser:
        """Returns a parser for one answer. `tools`: the request's tools, in OpenAI's form. None: it
        calls none.

        `prompt_end`: the last characters before the answer, which may begin it.
        """

    def stop_scope(self, prompt_end: str) -> StopScope:
        """Returns a scope for one answer, in which stop texts apply to the content. `prompt_end`:
        as in `parser`."""
        return ContentScope(self.parser(prompt_end, ()))

    def structure(
        self, tools: Sequence[Mapping[str, Any]], *, parallel: bool, required: bool = True
    ) -> dict[str, Any] | None:
        """Returns the structure of an answer that calls one of `tools`, or several if `parallel`: a
        `format` of structural tags. None: it cannot be stated.

        Not `required`: any text is allowed, but the beginning of a call must be followed by a whole
        call. A text's schema may have an "x-grammar" in Lark.
        """
        return None

    def content(self, structure: dict[str, Any]) -> dict[str, Any]:
        """Returns the structure of an answer without calls whose content has `structure`."""
        return structure

    def after_reasoning(
        self, structure: dict[str, Any], template_kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Returns the structure of an answer that may begin with reasoning, followed by
        `structure`."""
        return structure

    def reasoning_counters(
        self, renderer: Renderer
    ) -> Callable[[Sequence[int]], ReasoningCounter] | None:
        """Returns a function that makes an answer's counter from its prompt's tokens. None:
        reasoning is not counted.

        It may take a part of a second if it scans the whole vocabulary.
        """
        return None


def prompt_end(renderer: Renderer, token_ids: Sequence[int]) -> str:
    """The last characters of a prompt of these tokens, for `AnswerFormat.parser`."""
    return renderer.decode(token_ids[-_PROMPT_END:])
