"""Finds where reasoning begins and ends among the tokens of an answer, however a tokenizer splits
its marks. Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from threading import Lock
from typing import NamedTuple
from weakref import WeakKeyDictionary

from toolkit_lm.renderer import AnswerFormat, ReasoningCounter, Renderer

PROMPT_END = 64
"""Tokens of the prompt that show whether it has begun reasoning."""


class Marks(NamedTuple):
    """Marks that a format writes around reasoning."""

    start: str
    end: str
    repeats: bool = False
    """Reasoning may begin anywhere, and several times. False: it begins the answer, or the prompt
    has begun it."""
    forced: str | None = None
    """Text that ends reasoning which has spent its budget; None: the end mark."""
    forced_again: str | None = None
    """Text that ends reasoning which begins after the budget is spent; None: the same as `forced`.
    """


MarkTexts = Mapping[int, str]
"""Texts of tokens that may be part of a mark, or are white space before one, by token id."""
_OTHER = "\0"
"""The text of any other token."""
_KNOWN: WeakKeyDictionary[Renderer, dict[Marks, MarkTexts]] = WeakKeyDictionary()
_LOCK = Lock()


def mark_texts(renderer: Renderer, marks: Marks) -> MarkTexts:
    """Texts of the mark-related tokens in a renderer's vocabulary. The first call scans the whole
    vocabulary."""
    with _LOCK:
        known = _KNOWN.setdefault(renderer, {})
        if marks not in known:
            token_ids = range(renderer.vocab_size)
            counts = _part_of(marks)
            known[marks] = {
                token_id: text
                for token_id, text in zip(token_ids, renderer.token_texts(token_ids), strict=True)
                if counts(text)
            }
        return known[marks]


def _part_of(marks: Marks) -> Callable[[str], bool]:
    """Whether a token may be in a mark, have one, end in the beginning of one, or begin with the
    end of one; or is white space.

    So are those that what is forced may be written with.
    """
    start = marks.start
    end = marks.end
    forced = "\0".join(filter(None, (start, end, marks.forced, marks.forced_again)))
    beginnings = tuple(mark[:at] for mark in (start, end) for at in range(1, len(mark)))
    ends = tuple(mark[at:] for mark in (start, end) for at in range(1, len(mark)))

    def counts(text: str) -> bool:
        if text.endswith(beginnings) or text.startswith(ends) or text.isspace():
            return True
        return bool(text) and (text in forced or (bool(start) and start in text) or end in text)

    return counts


def shortest(text: str, texts: MarkTexts, written: Sequence[int]) -> list[int]:
    """The tokens of a text: as a tokenizer has `written` it, or fewer, the longest first.

    Some tokenizers take no text for special tokens.
    """
    by_text = {text: token_id for token_id, text in texts.items()}
    found = []
    at = 0
    while at < len(text):
        end = next((end for end in range(len(text), at, -1) if text[at:end] in by_text), None)
        if end is None:
            return list(written)
        found.append(by_text[text[at:end]])
        at = end
    return found if len(found) < len(written) else list(written)


class ReasoningReader(ReasoningCounter):
    """Reads an answer token by token. What it knows follows from the tokens alone."""

    def __init__(self, marks: Marks, texts: MarkTexts, prompt_token_ids: Sequence[int]) -> None:
        """`texts`: as `mark_texts` gives them. `prompt_token_ids`: the last ones are enough."""
        self._marks = marks
        self._texts = texts
        before = "".join(texts.get(token_id, _OTHER) for token_id in prompt_token_ids[-PROMPT_END:])
        self.is_inside = before.rstrip().endswith(marks.start.rstrip())
        """The next token is reasoning, or of the end mark."""
        self.num_spans = int(self.is_inside)
        """How often reasoning has begun."""
        self.num_at_start = 0
        """Tokens of reasoning before the last time that it began."""
        self._is_over = False
        """Nothing is reasoning from here on."""
        self._tail: list[str] = []
        """Texts of the last tokens, in which a mark may have begun."""

    def copy(self) -> ReasoningReader:
        """At the same place, and independent from then on."""
        copied = copy(self)
        copied._tail = [*self._tail]
        return copied

    def push(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if self._is_over:
                return
            text = self._texts.get(token_id, _OTHER)
            if self.is_inside:
                self.num_tokens += 1
                if num_of_mark := self._find(self._marks.end, text):
                    self.num_tokens -= num_of_mark
                    self.is_inside = False
                    self._tail = []
                    self._is_over = not self._marks.repeats
            elif self._begins(text):
                self.is_inside = True
                self._tail = []
                self.num_spans, self.num_at_start = self.num_spans + 1, self.num_tokens

    def _begins(self, text: str) -> bool:
        """Whether the start mark ends in this token."""
        if self._marks.repeats:
            return self._find(self._marks.start, text) > 0
        self._tail = [begun] if (begun := "".join([*self._tail, text]).lstrip()) else []
        self._is_over = not (
            begun.startswith(self._marks.start) or self._marks.start.startswith(begun)
        )
        return begun.startswith(self._marks.start)

    def _find(self, mark: str, text: str) -> int:
        """In how many of the last tokens a mark is that ends in this one; 0: there is none."""
        self._tail.append(text)
        joined = "".join(self._tail)
        if (place := joined.find(mark)) >= 0:
            return len(self._tail) - self._token_at(place)
        begun = next(
            (
                at
                for at in range(max(0, len(joined) - len(mark) + 1), len(joined))
                if mark.startswith(joined[at:])
            ),
            len(joined),
        )
        self._tail = self._tail[self._token_at(begun) :]
        return 0

    def _token_at(self, place: int) -> int:
        """Which of the last tokens has the character of this place."""
        for number, text in enumerate(self._tail):
            if place < len(text):
                return number
            place -= len(text)
        return len(self._tail)


class MarkedReasoning(AnswerFormat):
    """A format whose reasoning stands between marks."""

    @property
    @abstractmethod
    def marks(self) -> Marks:
        """Marks of this format's reasoning."""

    def reasoning_counters(self, renderer: Renderer) -> Callable[[Sequence[int]], ReasoningCounter]:
        return partial(ReasoningReader, self.marks, mark_texts(renderer, self.marks))
