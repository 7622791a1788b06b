"""TextReader: how parsers read an answer that comes piece by piece."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from toolkit_lm_parsers.json_scanner import JsonScanner

MAX_NAME = 256
"""Characters of a function's name, or an argument's."""
_MOST_AGAIN = 4
_ALWAYS_AGAIN = 4096
"""Bound on rereading: up to _MOST_AGAIN characters for each character of the answer, plus
_ALWAYS_AGAIN. It limits the work on an answer that is full of marks."""
Result = TypeVar("Result")
Reading = Generator[None, None, Result]
"""A method that reads: `yield from` it. It waits for more text where what there is does not decide
what comes next."""


class TextReader:
    """The text of an answer so far, and where in it is read. What it says does not depend on how
    the text is cut into pieces."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self.functions = {
            f["name"]: f
            for tool in tools
            if isinstance(f := tool.get("function"), Mapping) and isinstance(f.get("name"), str)
        }
        """Functions that may be called, by name."""
        self.text = ""
        self.at = 0
        """Position in `text` of the next character to read."""
        self.cut = False
        self._ended = False
        self._base = 0
        """Characters of the answer before `text`."""
        self._held: list[str] | None = None
        """Text read since `keep` that has left `text`; None: no text is kept."""
        self._kept = 0
        """Position in `text` where the rest of the kept text begins."""
        self._places: dict[str, tuple[int, int]] = {}
        """Position in `text` from which a mark was searched, and the position where it was found,
        by mark."""
        self._num_again = 0
        """Characters that are read again."""
        self.num_calls = 0
        self._cut_mark: int | None = None
        """Position where the end of the text may have cut a mark."""

    def _set_text(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self._places.clear()

    def keep(self) -> None:
        """Keeps the following text for a possible second reading, until `go_back`, `release` or
        `call`."""
        self._held = []
        self._kept = self.at

    def release(self) -> None:
        """Drops the kept text: it is not read again."""
        self._held = None

    def _join(self) -> int:
        """Makes `text` begin where `keep` was called. Returns how much of it was read."""
        assert self._held is not None, "something is kept"
        if self._held:
            before = "".join(self._held)
            read = len(before) + self.at - self._kept
            self._base -= len(before) - self._kept
            self._set_text(before + self.text[self._kept :], read)
            self._held = []
            self._kept = 0
            return read
        return self.at - self._kept

    def unread(self, count: int) -> None:
        """Goes back by some characters, all of them read since `keep`."""
        self._join()
        self.at -= count

    def go_back(self) -> None:
        """To where `keep` was called, where that is still kept."""
        if self._held is not None:
            read = self._join()
            self.at -= read
            self._held = None

    def read_again(self, marks: Sequence[str], start: int = 0) -> str:
        """Handles kept text that turned out not to be what it began like. Returns the part of it
        that is content.

        Reading goes on at the first mark in it after `start` characters, or at its end."""
        read = self._join()
        text = self.text[self.at - read : self.at]
        # A mark may have begun at its end.
        end = max(min(start, read), read - max(map(len, marks)) + 1)
        first = min([end, *(at for mark in marks if (at := text.find(mark, start)) >= 0)])
        if self._num_again + read - first <= _ALWAYS_AGAIN + _MOST_AGAIN * (self._base + self.at):
            self._num_again += read - first
            end = first
        self._held = None
        self.at -= read - end
        return text[:end]

    def skip(self) -> None:
        """Nothing of what is left is read."""
        self.at = len(self.text)
        self._held = None

    @property
    def left(self) -> str:
        """The text since `keep`."""
        return (
            "".join(self._held or ()) + self.text[self.at if self._held is None else self._kept :]
        )

    @property
    def position(self) -> int:
        """Characters of the answer that were read."""
        return self._base + self.at

    @property
    def at_end(self) -> bool:
        """Whether the text is read to its end and no more will come."""
        return self._ended and self.at >= len(self.text)

    def peek(self) -> Reading[str]:
        """The next character; empty at the end."""
        while self.at >= len(self.text) and not self._ended:
            yield
        return self.text[self.at : self.at + 1]

    def accept(self, mark: str) -> Reading[bool]:
        """Reads a mark, if it comes next."""
        while (
            len(self.text) - self.at < len(mark)
            and mark.startswith(self.text[self.at :])
            and not self._ended
        ):
            yield
        if not self.text.startswith(mark, self.at):
            if (
                self._ended
                and len(self.text) - self.at < len(mark)
                and mark.startswith(self.text[self.at :])
            ):
                self._cut_mark = self.at
            return False
        self.at += len(mark)
        return True

    def close(self, mark: str) -> Reading[None]:
        """Reads the mark that ends a call, or what there is of it, if it comes next."""
        if not (yield from self.accept(mark)) and self.cut and self.at == self._cut_mark:
            self.at = len(self.text)

    def accept_any(self, marks: Sequence[str]) -> Reading[str | None]:
        """Reads the first of some marks that comes next."""
        for mark in marks:
            if (yield from self.accept(mark)):
                return mark
        return None

    def comes(self, marks: Sequence[str]) -> Reading[bool]:
        """Whether one of some marks comes next, which is not read."""
        mark = yield from self.accept_any(marks)
        self.at -= len(mark or "")
        return mark is not None

    def spaces(self) -> Reading[None]:
        """Reads white space."""
        while (character := (yield from self.peek())) and character.isspace():
            self.at += 1

    def until(self, marks: Sequence[str], sink: Callable[[str], None]) -> Reading[str | None]:
        """Reads up to the first of some marks, and the mark. None: there is none. None of them may
        begin with another.

        What a cut leaves of a mark is left out, where there are functions to call: one character
        only after calls, it may be anything.
        """
        longest = max(map(len, marks))
        firsts = {mark[0] for mark in marks}
        while True:
            end, mark = min(
                ((self._place_of(mark), mark) for mark in marks), default=(len(self.text), "")
            )
            if end == len(self.text):
                mark = ""
            if not self._ended or (self.cut and self.functions):
                # Before it another one may have begun, that goes on in what is to come.
                last = end if not self._ended or self.num_calls else end - 1
                for begin in range(max(self.at, len(self.text) - longest + 1), last):
                    if self.text[begin] in firsts and any(
                        mark.startswith(self.text[begin:]) for mark in marks
                    ):
                        end = begin
                        mark = ""
                        break
            sink(self.text[self.at : end])
            self.at = end + len(mark)
            if mark:
                return mark
            if self._ended:
                self.at = len(self.text)
                return None
            yield

    def _place_of(self, mark: str) -> int:
        """Position of the next `mark`; the text's length if there is none."""
        start, place = self._places.get(mark, (0, -1))
        if not start <= self.at <= place:
            place = self.text.find(mark, self.at)
            place = len(self.text) if place < 0 else place
            self._places[mark] = (self.at, place)
        return place

    def word(self, ends: Sequence[str]) -> Reading[str | None]:
        """A name: a short text on one line, up to one of some marks, which is not read. None: there
        is none."""
        word = ""
        while True:
            if (yield from self.comes(ends)):
                return word.strip() or None
            character = yield from self.peek()
            if character in ("", "\n") or len(word) >= MAX_NAME:
                return None
            word += character
            self.at += 1

    def json_value(
        self,
        sink: Callable[[str], None],
        *,
        is_key: bool = False,
        ends: Sequence[str] | None = None,
    ) -> Reading[bool]:
        """Reads a JSON value, of which `sink` gets the JSON. False: what comes next is none, or the
        text ends in it.

        `is_key`: an object's key. `ends`: marks at which brackets may be left open, as at the
        answer's end; None: nowhere.
        """
        scanner = JsonScanner(is_key=is_key)
        while True:
            self.at, read = scanner.feed(self.text, self.at)
            sink(read)
            if self.at >= len(self.text) and self._ended:
                sink(scanner.end())
            if scanner.is_done:
                return True
            if scanner.is_wrong or self._ended:
                break
            yield
        if ends is None or not ((self.at_end and not self.cut) or (yield from self.comes(ends))):
            return False
        closing = scanner.close()
        sink(closing or "")
        return closing is not None

    def json_text(self, *, is_key: bool = False) -> Reading[str | None]:
        """Reads a JSON string, or a key. None: what comes next is none."""
        read: list[str] = []
        if not (yield from self.json_value(read.append, is_key=is_key)):
            return None
        text: Any = json.loads("".join(read))
        return text if isinstance(text, str) and is_encodable(text) else None


def is_encodable(text: str) -> bool:
    """False: it has halves of characters, which no answer can have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
