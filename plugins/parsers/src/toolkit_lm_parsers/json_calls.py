"""JsonCalls: calls as JSON objects, which several formats have."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from toolkit_lm_parsers.json_scanner import read_json
from toolkit_lm_parsers.reading import Reading, is_encodable
from toolkit_lm_parsers.scanning import ScanParser

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = (*_NAMES, *_ARGUMENTS, "type", "id")
"""Keys of a call without marks. An object with another one is none, and it is not waited for its
end."""


class JsonCalls(ScanParser):
    """Reads calls such as {"name": "f", "arguments": {...}}. A call is reported when it has been
    read entirely."""

    opens: tuple[str, ...] = ()
    """Marks that begin a call, or several. They are never content."""
    words: tuple[str, ...] = ()
    """Those of `opens` that are content where no call follows."""
    closes: tuple[str, ...] = ()
    """Marks that end a call. After one that begins, they are never content."""
    ends: tuple[str, ...] = ()
    """Other texts that may end a call."""
    named: str | None = None
    """The function of a call that is being read."""
    names: tuple[str, ...] = _NAMES
    """Keys of a function's name in a call."""
    argument_names: tuple[str, ...] = _ARGUMENTS
    """Keys of its arguments."""
    only_known = False
    """True: calls to functions that the request does not have are content. For formats without
    marks."""

    @property
    def all_ends(self) -> tuple[str, ...]:
        return (*self.closes, *self.ends)

    def json_calls(self, *, is_list: bool = False) -> Reading[bool]:
        """Calls, in a list or one after the other. False: what comes next is none; what was read
        since `keep` is of no call.

        `is_list`: the list's bracket was read.
        """
        is_list = is_list or (yield from self.accept("["))
        yield from self.spaces()
        while (yield from self.json_call()):
            self.keep()
            yield from self.spaces()
            if is_list and (yield from self.accept("]")):
                return True
            goes_on = yield from self.accept(",")
            yield from self.spaces()
            if is_list and (yield from self.accept("]")):
                return True
            if not (yield from self.comes(("{",))) and not (goes_on and self.at_end and self.cut):
                self.go_back()
                return True
        return False

    def json_call(self) -> Reading[bool]:
        """One call. False: what comes next is none, or the text ends in it."""
        self.named = None
        name: str | None = None
        arguments: str | None = None
        if not (yield from self.accept("{")):
            return False
        yield from self.spaces()
        # Templates double braces in the same way.
        yield from self.accept("{")
        while True:
            yield from self.spaces()
            key = yield from self.json_text(is_key=True)
            yield from self.spaces()
            if (
                key is None
                or (self.only_known and key not in _BESIDE)
                or not (yield from self.accept(":"))
            ):
                return False
            yield from self.spaces()
            if key in self.names and name is None:
                name = yield from self.json_text()
                if not name or not self.is_callable(name):
                    return False
                self.named = name
            elif key in self.argument_names and arguments is None:
                arguments = yield from self.json_arguments(name)
                if arguments is None:
                    return False
            elif not (yield from self.json_value(lambda _: None)):
                return False
            yield from self.spaces()
            if (yield from self.accept(",")):
                yield from self.spaces()
                if (yield from self.peek()) != "}":
                    continue
            if (yield from self.accept("}")) or (yield from self.ends_here()):
                break
            return False
        if name is None:
            return False
        if not self.call(name, arguments or "{}"):
            return False
        # Some models count their brackets wrong.
        while (yield from self.accept("}")):
            pass
        return True

    def json_arguments(self, name: str | None = None) -> Reading[str | None]:
        """The JSON of an object, which may be the text of a string. None: what comes next is none.

        `name`: of the function, whose call may be given in pieces.
        """
        read: list[str] = []
        first = yield from self.peek()
        if first == "{":
            tell = None if name is None else self.begin_call(name)

            def add_piece(piece: str) -> None:
                read.append(piece)
                if tell is not None:
                    tell(piece)

            return (
                "".join(read)
                if (yield from self.json_value(add_piece, ends=self.all_ends))
                else None
            )
        if not (yield from self.json_value(read.append)):
            return None
        value = json.loads("".join(read))
        if value is None or (isinstance(value, str) and not value.strip()):
            return "{}"
        text = read_json(value) if isinstance(value, str) else None
        return (
            text
            if text is not None and text.lstrip().startswith("{") and is_encodable(text)
            else None
        )

    def ends_here(self) -> Reading[bool]:
        """The model has ended the call, or its answer."""
        yield from self.peek()
        return (self.at_end and not self.cut) or (yield from self.comes(self.all_ends))

    def give_up(self) -> None:
        """After a reading that returned False: what was read since `keep` is content, but for
        marks.

        A call that the end of the text cuts is left out.
        """
        if self.is_cut and self.is_begun():
            self.lacks_call = True
            self.skip()
            return
        marks = (*self.opens, *self.closes)
        text = self.read_again(marks)
        for mark in marks:
            text = text if mark in self.words else text.replace(mark, "")
        self.say(text)

    def is_begun(self) -> bool:
        """Whether what was read since `keep` can only be a call."""
        return True

    def is_callable(self, name: str) -> bool:
        return name in self.functions or not self.only_known


class MarkedCalls(JsonCalls):
    """Reads calls that begin with a mark, between which content may stand."""

    keeps_first_ends = False
    """Marks that end a call are content before one that begins a call: as text they may be meant.
    """

    @abstractmethod
    def read_calls(self, mark: str) -> Reading[bool]:
        """Reads the text after a mark. False: it is not a call, or the text ends within it."""

    def run(self) -> Reading[None]:
        has_begun = not self.keeps_first_ends
        while (mark := (yield from self.until((*self.opens, *self.closes), self.say))) is not None:
            if mark in self.closes:
                # Before anything was opened it can only be meant.
                self.say("" if has_begun else mark)
                continue
            has_begun = True
            self.keep()
            if not (yield from self.read_calls(mark)):
                if mark in self.words and not self.is_cut:
                    self.say(mark)
                self.give_up()
            self.release()


def dumps(value: Any) -> str:
    """The JSON of a value that was read."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_encodable(text) else json.dumps(value)
