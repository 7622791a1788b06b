"""JsonCalls: calls as JSON objects, which several formats have."""

from __future__ import annotations

import json
from abc import abstractmethod
from typing import Any

from toolkit_lm_parsers.scanning import Reading, ScanParser, is_encodable

_ARGUMENTS = ("arguments", "parameters")


class JsonCalls(ScanParser):
    """Reads calls such as {"name": "f", "arguments": {...}}."""

    named: str | None = None
    """The function of a call that is being read."""
    only_known = False
    """What calls no function of the request is no call: for formats without marks."""

    def json_calls(self) -> Reading[bool]:
        """One call, or a list of them. False: what comes next is none; the last call may be open."""
        if not (yield from self.accept("[")):
            return (yield from self.json_call())
        yield from self.spaces()
        while (yield from self.json_call()):
            yield from self.spaces()
            if (yield from self.accept_any((",", "]"))) != ",":
                return True
            self.keep()
            yield from self.spaces()
        return False

    def json_call(self) -> Reading[bool]:
        """One call. False: what comes next is none, or the text ends in it; where its name is known, it is open then."""
        self.named = None
        if not (yield from self.accept("{")):
            return False
        name: str | None = None
        held: list[str] | None = None
        is_begun = False
        while True:
            yield from self.spaces()
            key = yield from self.json_text()
            yield from self.spaces()
            if key is None or not (yield from self.accept(":")):
                return False
            yield from self.spaces()
            if key == "name" and name is None:
                name = yield from self.json_text()
                if not name or not self._is_callable(name):
                    return False
                self.named = name
                if held is not None:
                    self.begin_call(name)
                    self.add_arguments("".join(held))
                    is_begun = True
            elif key in _ARGUMENTS and held is None and not is_begun:
                if name is None:
                    held = []
                    if not (yield from self.json_arguments(None, held)):
                        return False
                else:
                    is_begun = True
                    if not (yield from self.json_arguments(name, [])):
                        return False
            elif not (yield from self.json_value(lambda _: None)):
                return False
            yield from self.spaces()
            mark = yield from self.accept_any((",", "}"))
            if mark is None:
                return False
            if mark == "}":
                break
        self.named = None
        if name is None:
            return False
        if not is_begun:
            self.begin_call(name)
            self.add_arguments("{}")
        self.end_call()
        return True

    def json_arguments(self, name: str | None, held: list[str]) -> Reading[bool]:
        """An object, also as the text of a string. Begins the call of `name`; None: they are held."""
        first = yield from self.peek()
        if first == "{":
            if name is not None:
                self.begin_call(name)
            return (yield from self.json_value(held.append if name is None else self.add_arguments))
        text: str | None
        if first == '"':
            text = yield from self.json_text()
        elif first == "n":
            text = "{}" if (yield from self.accept("null")) else None
        else:
            text = None
        if text is None or not is_object(text):
            return False
        held.append(text)
        if name is not None:
            self.begin_call(name)
            self.add_arguments(text)
        return True

    def give_up(self, mark: str) -> None:
        """After a reading that returned False: where no call is open, what was read since `keep` is content, and so is `mark` before it.

        A call that the end of the text cuts stays open, and begins where its name is known; else there is nothing to tell of it.
        """
        if self.is_call_open:
            if self.is_cut:
                self.skip()
            else:
                self.break_call()
        elif self.is_cut and self.named is not None:
            self.begin_call(self.named)
            self.skip()
        elif (self.is_cut and (mark or self.num_calls)) or (self.cut and self.begins_call(self.left)):
            self.skip()
        else:
            self.go_back()
            self.say(mark)

    def begins_call(self, text: str) -> bool:
        """Whether a call to a function of the request may go on so, of a format without marks."""
        return False

    def _is_callable(self, name: str) -> bool:
        return name in self.functions or not self.only_known


class MarkedCalls(JsonCalls):
    """Reads calls that begin with a mark, between which content may stand."""

    opens: tuple[str, ...] = ()

    @abstractmethod
    def read_calls(self, mark: str) -> Reading[bool]:
        """What follows a mark. False: it is no call, or the text ends in it."""

    def run(self) -> Reading[None]:
        while (mark := (yield from self.until(self.opens, self.say))) is not None:
            before = self.num_calls
            self.keep()
            if not (yield from self.read_calls(mark)):
                self.give_up(mark if self.num_calls == before else "")
            self.release()


def is_object(text: str) -> bool:
    """Whether a text is the JSON of an object."""
    try:
        return isinstance(json.loads(text, parse_constant=_no_constant), dict)
    except (ValueError, RecursionError):
        return False


def dumps(value: Any) -> str:
    """The JSON of a value that was read."""
    text = json.dumps(value, ensure_ascii=False)
    return text if is_encodable(text) else json.dumps(value)


def is_json(text: str) -> bool:
    """Whether a text is JSON."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
