"""Regular expressions of somebody else's files, matched in a bounded number of steps.

`re` tries one way after the other, and a pattern such as "(a+)+b" has it try them without end. Here
all ways are followed at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as ops, _parser as parser  # type: ignore[attr-defined]
from typing import Any

from toolkit_lm.errors import CheckpointError

MOST_STEPS = 20_000
"""Most steps of one match. Usual patterns take some hundreds."""
_MOST_LENGTH = 16_384
"""Most characters of a pattern."""
_QUICK_REPEATS = 2
_QUICK_WAYS = 16
"""Most repetitions, and most choices of alternatives, of a pattern that is left to `re`: of a name
with 100 characters that is some 10,000 steps each."""
_ONE = (ops.LITERAL, ops.NOT_LITERAL, ops.ANY, ops.IN)
"""Parts that are one character."""
_CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}
_ENDS = {
    ops.AT_BEGINNING: r"\A",
    ops.AT_BEGINNING_STRING: r"\A",
    ops.AT_END: "$",
    ops.AT_END_STRING: r"\Z",
    ops.AT_BOUNDARY: r"\b",
    ops.AT_NON_BOUNDARY: r"\B",
}


class PatternError(CheckpointError):
    """A pattern is none, has what is not supported, or takes too many steps."""


@lru_cache(4096)
def parsed(pattern: str) -> Any:
    """The parts of a pattern. Raises PatternError."""
    if len(pattern) > _MOST_LENGTH:
        raise PatternError(f"it has more than {_MOST_LENGTH} characters")
    try:
        found = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise PatternError(str(error)) from None
    if found.state.flags & ~re.UNICODE:
        raise PatternError("it has flags, which are not supported")
    return found


def matches(pattern: str, text: str) -> bool:
    """Whether all of a text matches: `re.fullmatch`. Raises PatternError."""
    if (quick := _quick(pattern)) is not None:
        return quick.fullmatch(text) is not None
    return len(text) in ends(pattern, text, [0])


def begins(pattern: str, text: str) -> bool:
    """Whether the beginning of a text matches: `re.match`. Raises PatternError."""
    if (quick := _quick(pattern)) is not None:
        return quick.match(text) is not None
    return bool(ends(pattern, text, [0]))


def finds(pattern: str, text: str) -> bool:
    """Whether any part of a text matches: `re.search`. Raises PatternError."""
    if (quick := _quick(pattern)) is not None:
        return quick.search(text) is not None
    return bool(ends(pattern, text, range(len(text) + 1)))


def ends(pattern: str, text: str, starts: Iterable[int]) -> set[int]:
    """Ends of the matches of a pattern that begin at `starts`. Raises PatternError."""
    return _Matcher(pattern, text).after(parsed(pattern), set(starts))


@lru_cache(4096)
def _quick(pattern: str) -> re.Pattern[str] | None:
    """The pattern for `re`, where that cannot take many steps. None: it can."""
    repeats, ways = _counts(parsed(pattern))
    return re.compile(pattern) if repeats <= _QUICK_REPEATS and ways <= _QUICK_WAYS else None


def _counts(parts: Any) -> tuple[float, int]:
    """How many repetitions of one character a pattern has, infinity where it has what may take many
    steps, and how many choices of alternatives."""
    repeats: float = 0
    ways = 1
    for op, value in parts:
        inner: list[Any] = []
        if op is ops.BRANCH:
            inner = value[1]
            ways *= len(inner)
        elif op is ops.SUBPATTERN:
            inner = [value[3]]
        elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            [*items] = value[2]
            repeats += 1 if len(items) == 1 and items[0][0] in _ONE else math.inf
        elif op not in _ONE and op is not ops.AT:
            repeats = math.inf
        for each in inner:
            more, own = _counts(each)
            repeats += more
            ways *= own
    return repeats, ways


class _Matcher:
    """The ways through one text."""

    def __init__(self, pattern: str, text: str) -> None:
        self._pattern = pattern
        self._text = text
        self._left = MOST_STEPS

    def _error(self, why: str) -> PatternError:
        return PatternError(f"the pattern {self._pattern[:200]!r} {why}.")

    def after(self, parts: Any, at: set[int]) -> set[int]:
        """Positions after all of the parts, from any of `at`."""
        for op, value in parts:
            self._left -= len(at) + 1
            if self._left < 0:
                raise self._error(f"takes more than {MOST_STEPS} steps for {self._text!r}")
            at = self._step(op, value, at)
            if not at:
                break
        return at

    def _step(self, op: Any, value: Any, at: set[int]) -> set[int]:
        text = self._text
        if op in _ONE:
            return {i + 1 for i in at if i < len(text) and _is_one(op, value, text[i])}
        if op is ops.BRANCH:
            return {end for branch in value[1] for end in self.after(branch, at)}
        if op is ops.SUBPATTERN and not (value[1] or value[2]):
            return self.after(value[3], at)
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            least, most, parts = value
            return self._repeated(least, most, parts, at)
        if op is ops.AT and value in _ENDS:
            place = re.compile(_ENDS[value])
            return {i for i in at if place.match(text, i)}
        if op in (ops.ASSERT, ops.ASSERT_NOT):
            direction, parts = value
            back, most = parts.getwidth() if direction < 0 else (0, 0)
            if back != most:
                raise self._error("looks behind at a text of no fixed length")
            return {
                i
                for i in at
                if self._follows(parts, i - back, i if back else None) == (op is ops.ASSERT)
            }
        raise self._error(f"has {str(op).lower()}, which is not supported")

    def _follows(self, parts: Any, start: int, end: int | None) -> bool:
        found = self.after(parts, {start}) if start >= 0 else set()
        return bool(found) if end is None else end in found

    def _repeated(self, least: int, most: int, parts: Any, at: set[int]) -> set[int]:
        # More rounds than the text has places change nothing.
        rounds = 2 * len(self._text) + 2
        for _ in range(min(least, rounds)):
            at = self.after(parts, at)
        found = new = at
        for _ in range(min(most - least, rounds)):
            new = self.after(parts, new) - found
            if not new:
                break
            found = found | new
        return found


def _is_one(op: Any, value: Any, character: str) -> bool:
    """Whether a character matches a part that is one character."""
    code = ord(character)
    if op is ops.ANY:
        return character != "\n"
    if op is not ops.IN:
        return bool((code == value) == (op is ops.LITERAL))
    is_in = any(_is_of_set(kind, each, character) for kind, each in value)
    return bool(is_in != (value[0][0] is ops.NEGATE))


def _is_of_set(kind: Any, value: Any, character: str) -> bool:
    code = ord(character)
    if kind is ops.LITERAL:
        return bool(code == value)
    if kind is ops.RANGE:
        return bool(value[0] <= code <= value[1])
    return bool(kind is ops.CATEGORY and re.match(_CATEGORIES[value], character))
