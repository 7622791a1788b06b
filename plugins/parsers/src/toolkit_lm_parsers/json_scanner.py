"""JsonScanner: whether a text that comes in pieces is a JSON value."""

from __future__ import annotations

MAX_DEPTH = 100
"""Levels that a value may be nested."""
_MOST_LITERAL = 400
"""Characters of a number."""
_WORDS = ("true", "false", "null")
_DIGITS = "0123456789"
_ESCAPES = '"\\/bfnrtu'
_CLOSES = {"{": "}", "[": "]"}


class JsonScanner:
    """Reads one value, strictly but for control characters in strings, which it escapes: models write new lines there."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_wrong = False
        self._open: list[str] = []
        self._wanted = "value"
        """What comes next: value, first value, key, first key, colon, comma, string, escape, hex, literal."""
        self._is_key = False
        self._num_hex = 0
        self._literal = ""

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads on from `at`: where it stopped, and what it read. It stops at the value's end, or before what is wrong."""
        start, read = at, []
        while at < len(text) and not (self.is_done or self.is_wrong):
            character = text[at]
            if self._wanted == "string":
                end = self._string_end(text, at)
                if end > at:
                    at = end
                    continue
                if character < " ":
                    read += [text[start:at], f"\\u{ord(character):04x}"]
                    start = at + 1
            if self._wanted == "literal" and character not in _LITERAL:
                self._end_literal()
                continue
            if not self._step(character):
                self.is_wrong = True
                break
            at += 1
        return at, "".join([*read, text[start:at]])

    def end(self) -> None:
        """The text is over: a number may be."""
        if self._wanted == "literal" and not self._open:
            self._end_literal()

    @staticmethod
    def _string_end(text: str, at: int) -> int:
        """Where the next character of a string is that means something."""
        while at < len(text) and text[at] not in '"\\' and text[at] >= " ":
            at += 1
        return at

    def _step(self, character: str) -> bool:
        """Takes a character in. False: it cannot stand here."""
        match self._wanted:
            case "string":
                if character == '"':
                    self._end_string()
                elif character == "\\":
                    self._wanted = "escape"
            case "escape":
                self._wanted, self._num_hex = ("hex", 4) if character == "u" else ("string", 0)
                return character in _ESCAPES
            case "hex":
                self._num_hex -= 1
                if not self._num_hex:
                    self._wanted = "string"
                return character in "0123456789abcdefABCDEF"
            case "literal":
                self._literal += character
                return len(self._literal) <= _MOST_LITERAL
            case _:
                return character in " \t\n\r" or self._begin(character)
        return True

    def _begin(self, character: str) -> bool:
        """Takes in a character outside of strings and literals."""
        wanted = self._wanted
        if wanted in ("key", "first key"):
            if character == "}" and wanted == "first key":
                self._close()
                return True
            self._wanted, self._is_key = "string", True
            return character == '"'
        if wanted == "colon":
            self._wanted = "value"
            return character == ":"
        if wanted == "comma":
            if character == _CLOSES[self._open[-1]]:
                self._close()
                return True
            self._wanted = "key" if self._open[-1] == "{" else "value"
            return character == ","
        if character == "]" and wanted == "first value":
            self._close()
        elif character in "{[":
            self._open.append(character)
            self._wanted = "first key" if character == "{" else "first value"
            return len(self._open) <= MAX_DEPTH
        elif character == '"':
            self._wanted, self._is_key = "string", False
        else:
            self._wanted, self._literal = "literal", character
            return character in "-tfn" or character in _DIGITS
        return True

    def _end_string(self) -> None:
        if self._is_key:
            self._wanted = "colon"
        else:
            self._end_value()

    def _end_literal(self) -> None:
        if is_literal(self._literal):
            self._end_value()
        else:
            self.is_wrong = True

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._wanted = "comma"
        self.is_done = not self._open


_LITERAL = frozenset("+-.eEtrufalsn" + _DIGITS)
"""Characters of numbers, true, false and null."""


def is_literal(text: str) -> bool:
    """Whether a text is a number, true, false or null."""
    if text in _WORDS:
        return True
    mantissa, has_exponent, exponent = text.removeprefix("-").lower().partition("e")
    if has_exponent and not _are_digits(exponent[1:] if exponent[:1] in ("+", "-") else exponent):
        return False
    whole, point, fraction = mantissa.partition(".")
    return _are_digits(whole) and (whole == "0" or whole[0] != "0") and (not point or _are_digits(fraction))


def _are_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()
