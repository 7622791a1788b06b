"""ScanParser: what all parsers of answers are made of."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from toolkit_lm.renderer import AnswerDelta, AnswerParser, ToolCallDelta

from toolkit_lm_parsers.json_scanner import JsonScanner

MAX_NAME = 256
"""Characters of a function's name, or an argument's."""
Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A method that reads: `yield from` it. It waits for more text where what there is does not decide what comes next."""


class ScanParser(AnswerParser):
    """A parser written as one generator, `run`, that reads the text as if it were all there.

    What it decides depends on what was read, and it waits where that is not enough: so that all cuts of a text give the same.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.functions = {
            f["name"]: f for tool in tools if isinstance(f := tool.get("function"), Mapping) and isinstance(f.get("name"), str)
        }
        """What may be called, by name."""
        self.text = ""
        self.at = 0
        """Where the next character is."""
        self.cut = False
        self._ended = False
        self._kept: int | None = None
        """Where the text begins that may have to be read again."""
        self.content = Trimmed(starts=False)
        self._reasoning = Trimmed(starts=True)
        self._calls: list[ToolCallDelta] = []
        self.num_calls = 0
        self._is_open = False
        self._has_broken = False
        self._cut_mark: int | None = None
        """Where the end of the text may have cut a mark."""
        self._running: Reading[None] | None = None

    @abstractmethod
    def run(self) -> Reading[None]:
        """Reads the whole answer."""

    def push(self, text: str) -> AnswerDelta:
        start = self.at if self._kept is None else self._kept
        self.text = self.text[start:] + text
        self.at -= start
        self._kept = None if self._kept is None else 0
        return self._go_on()

    def finish(self, *, cut: bool) -> AnswerDelta:
        self._ended, self.cut = True, cut
        delta = self._go_on()
        content, reasoning = self.content.rest if not self.num_calls else "", ""
        return AnswerDelta(delta.content + content, delta.reasoning + reasoning, delta.tool_calls)

    @property
    def calls_tools(self) -> bool:
        return self.num_calls > 0 and not self._is_open and not self._has_broken

    def _go_on(self) -> AnswerDelta:
        if self._running is None:
            self._running = self.run()
        next(self._running, None)
        calls, self._calls = tuple(_merged(self._calls)), []
        return AnswerDelta(self.content.take(), self._reasoning.take(), calls)

    @property
    def is_cut(self) -> bool:
        """All was read but for a mark that is not whole, and the model did not end it."""
        return self.cut and (self.at_end or self.at == self._cut_mark)

    # What is found

    def say(self, text: str) -> None:
        """Content. White space before a call is left out, and where nothing but calls comes."""
        self.content.add(text)

    def think(self, text: str) -> None:
        """Reasoning, whose surrounding white space is left out."""
        self._reasoning.add(text)

    def separate(self) -> None:
        """What is said or thought next is another paragraph."""
        self.content.separate()
        self._reasoning.separate()

    def end_reasoning(self) -> None:
        """White space between reasoning and content is left out."""
        self.content.starts = not self.content.has_any

    def begin_call(self, name: str) -> None:
        self.content.rest = ""
        self.content.starts = not self.content.has_any
        self._calls.append(ToolCallDelta(self.num_calls, name, ""))
        self.num_calls += 1
        self._is_open = True
        self._kept = None

    def add_arguments(self, text: str) -> None:
        if text:
            self._calls.append(ToolCallDelta(self.num_calls - 1, None, text))

    def end_call(self) -> None:
        self._is_open = False

    @property
    def is_call_open(self) -> bool:
        return self._is_open

    def break_call(self) -> None:
        """The open call goes on with what is no JSON. It stays as it is, and the answer's end does not call tools."""
        self._is_open, self._has_broken = False, True

    # Reading

    def keep(self) -> None:
        """What follows may have to be read again, until `go_back` or `begin_call`."""
        self._kept = self.at

    def go_back(self) -> None:
        """To where `keep` was called, if no call has begun since."""
        if self._kept is not None:
            self.at, self._kept = self._kept, None

    def release(self) -> None:
        """What was kept is not read again."""
        self._kept = None

    def skip(self) -> None:
        """Nothing of what is left is read."""
        self.at, self._kept = len(self.text), None

    @property
    def left(self) -> str:
        """The text since `keep`."""
        return self.text[self.at if self._kept is None else self._kept :]

    @property
    def at_end(self) -> bool:
        """There is no more text, and none will come."""
        return self._ended and self.at >= len(self.text)

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text) and not self._ended:
            yield
        return self.text[self.at : self.at + 1]

    def accept(self, mark: str) -> Reading[bool]:
        """Reads a mark, if it comes next."""
        while len(self.text) - self.at < len(mark) and mark.startswith(self.text[self.at :]) and not self._ended:
            yield
        if not self.text.startswith(mark, self.at):
            if self._ended and mark.startswith(self.text[self.at :]):
                self._cut_mark = self.at
            return False
        self.at += len(mark)
        return True

    def close(self, mark: str) -> Reading[None]:
        """Reads the mark that ends a call, or what there is of it, if it comes next."""
        if not (yield from self.accept(mark)) and self.cut and mark.startswith(self.text[self.at :]):
            self.at = len(self.text)

    def accept_any(self, marks: Sequence[str]) -> Reading[str | None]:
        """Reads the first of some marks that comes next."""
        for mark in marks:
            if (yield from self.accept(mark)):
                return mark
        return None

    def spaces(self) -> Reading[None]:
        """Reads white space."""
        while (character := (yield from self.peek())) and character.isspace():
            self.at += 1

    def until(self, marks: Sequence[str], take: Callable[[str], None]) -> Reading[str | None]:
        """Reads up to the first of some marks, and the mark. None: there is none. None of them may begin with another.

        What a cut leaves of a mark is left out, where there are functions to call: one character only after calls, it may be anything.
        """
        longest = max(map(len, marks))
        while True:
            found = [(at, mark) for mark in marks if (at := self.text.find(mark, self.at)) >= 0]
            end, mark = min(found, default=(len(self.text), None))
            if not self._ended or (self.cut and self.functions):
                # Before it another one may have begun, that goes on in what is to come.
                last = end if not self._ended or self.num_calls else end - 1
                for begin in range(max(self.at, len(self.text) - longest + 1), last):
                    if any(one.startswith(self.text[begin:]) for one in marks):
                        end, mark = begin, ""
                        break
            take(self.text[self.at : end])
            self.at = end + len(mark or "")
            if mark:
                return mark
            if self._ended:
                self.at = len(self.text)
                return None
            yield

    def word(self, ends: Sequence[str]) -> Reading[str | None]:
        """A name: a short text on one line, up to one of some marks, which is not read. None: there is none."""
        word = ""
        while True:
            if (end := (yield from self.accept_any(ends))) is not None:
                self.at -= len(end)
                return word.strip() or None
            character = yield from self.peek()
            if character in ("", "\n") or len(word) >= MAX_NAME:
                return None
            word += character
            self.at += 1

    def rest(self) -> Reading[None]:
        """All that is left is content."""
        while not self.at_end:
            self.say(self.text[self.at :])
            self.at = len(self.text)
            yield from self.peek()

    def json_value(self, take: Callable[[str], None]) -> Reading[bool]:
        """Reads a JSON value. False: what comes next is none, or the text ends in it."""
        scanner = JsonScanner()
        while True:
            self.at, read = scanner.feed(self.text, self.at)
            take(read)
            if self.at >= len(self.text) and self._ended:
                scanner.end()
            if scanner.is_done or scanner.is_wrong or self._ended:
                return scanner.is_done and not scanner.is_wrong
            yield

    def json_text(self) -> Reading[str | None]:
        """Reads a JSON string. None: what comes next is none."""
        if (yield from self.peek()) != '"':
            return None
        read: list[str] = []
        if not (yield from self.json_value(read.append)):
            return None
        text: str = json.loads("".join(read))
        return text if is_encodable(text) else None


def is_encodable(text: str) -> bool:
    """False: it has halves of characters, which no answer can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Trimmed:
    """A part of an answer without white space at its end, and on demand at its beginning."""

    def __init__(self, *, starts: bool) -> None:
        self.starts = starts
        """White space that comes next is left out."""
        self.ends = True
        """White space at the end is left out."""
        self.has_any = False
        self.rest = ""
        """White space that may be at the end."""
        self._new: list[str] = []
        self._is_separate = False

    def add(self, text: str) -> None:
        if self.starts:
            text = text.lstrip()
        if not text:
            return
        text = self.rest + text
        kept = len(text.rstrip()) if self.ends else len(text)
        self.rest = text[kept:]
        if self.starts and kept and self._is_separate:
            self._new.append("\n\n")
        if kept:
            self.starts, self.has_any = False, True
            self._new.append(text[:kept])

    def separate(self) -> None:
        if self.has_any:
            self.rest, self.starts, self._is_separate = "", True, True

    def take(self) -> str:
        new, self._new = "".join(self._new), []
        return new


def _merged(calls: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """One delta for each call."""
    merged: list[ToolCallDelta] = []
    for one in calls:
        if merged and merged[-1].index == one.index:
            merged[-1] = replace(merged[-1], arguments=merged[-1].arguments + one.arguments)
        else:
            merged.append(one)
    return merged
