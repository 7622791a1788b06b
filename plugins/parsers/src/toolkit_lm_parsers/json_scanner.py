"""JsonScanner: reads a JSON value that comes in pieces, and writes down the JSON that was meant."""

from __future__ import annotations

import json

MAX_DEPTH = 100
"""Levels that a value may be nested."""
_MOST_WORD = 400
"""Characters of a number, or of a key without quotes."""
_QUOTES = {'"': '"', "'": "'", "\N{LEFT DOUBLE QUOTATION MARK}": "\N{RIGHT DOUBLE QUOTATION MARK}"}
"""Closing character of a string, by the character that opens it."""
_CLOSES = {"{": "}", "[": "]", "(": ")"}
_WRITTEN = {"(": "[", ")": "]"}
"""Tuples are lists."""
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_ESCAPES = '"\\/bfnrt'
_SPACES = " \t\n\r"


class JsonScanner:
    """Reads one value and writes it as valid JSON, whatever it reads.

    Known faults in JSON from models are repaired where only one reading is possible: other kinds of
    quotes, keys without quotes, and new lines and unknown escapes in strings. So are True, False
    and None, tuples, an extra comma, and a bracket that closes an outer one while an inner one is
    open."""

    def __init__(self, *, is_key: bool = False) -> None:
        """`is_key`: reads the key of an object, and nothing of its value."""
        self.is_done = False
        self.is_wrong = False
        self._open: list[str] = []
        """The brackets that close what is open."""
        self._wanted = "key" if is_key else "value"
        """The expected next token: value, first value, key, first key, colon, comma, string,
        escape, hex or word."""
        self._is_key = False
        self._quote = ""
        """Character that ends the string being read."""
        self._word = ""
        """Characters so far of a number, a constant, or the digits of an escape."""
        self._num_hex = 0
        self._comma = ""
        """A comma, and white space after it, of which it is not known whether something follows."""

    def feed(self, text: str, at: int) -> tuple[int, str]:
        """Reads on from `at`. Returns where it stopped, and the JSON of what it read.

        It stops at the value's end, or at what is wrong.
        """
        read: list[str] = []
        while at < len(text) and not (self.is_done or self.is_wrong):
            character = text[at]
            if self._wanted == "string":
                end = self._string_end(text, at)
                if end > at:
                    read.append(text[at:end])
                    at = end
                    continue
            if self._wanted == "word" and not _is_of_word(character):
                self._end_word(read)
                continue
            if not self._step(character, read):
                self.is_wrong = True
                break
            at += 1
        return at, "".join(read)

    def end(self) -> str:
        """The text is over: a number may be. Returns its JSON."""
        read: list[str] = []
        if self._wanted == "word" and not self._open and not self._is_key:
            self._end_word(read)
        return "".join(read)

    def close(self) -> str | None:
        """Closes what is open, where the model ended the value without. None: it is in the middle
        of something."""
        read: list[str] = []
        if self._wanted == "word" and not self._is_key:
            self.is_wrong = False
            self._end_word(read)
        is_item = self._wanted == "value" and bool(self._comma)
        if self._wanted not in ("comma", "key", "first key", "first value") and not is_item:
            return None
        while self._open:
            self._pop(read)
        self.is_done = True
        self.is_wrong = False
        return "".join(read)

    def _string_end(self, text: str, at: int) -> int:
        """Position of the next character of a string that has a special meaning."""
        while (
            at < len(text) and text[at] not in '"\\' and text[at] != self._quote and text[at] >= " "
        ):
            at += 1
        return at

    def _step(self, character: str, read: list[str]) -> bool:
        """Takes a character in. False: it cannot stand here."""
        match self._wanted:
            case "string":
                self._in_string(character, read)
            case "escape":
                self._escape(character, read)
            case "hex":
                self._hex(character, read)
            case "word":
                self._word += character
                return len(self._word) <= _MOST_WORD
            case _ if character in _SPACES:
                if self._comma:
                    self._comma += character
                else:
                    read.append(character)
            case _:
                return self._begin(character, read)
        return True

    def _in_string(self, character: str, read: list[str]) -> None:
        if character == self._quote:
            read.append('"')
            self._end_string()
        elif character == "\\":
            self._wanted = "escape"
        elif character == '"':
            read.append('\\"')
        else:
            read.append(f"\\u{ord(character):04x}")

    def _escape(self, character: str, read: list[str]) -> None:
        """Reads the character after a backslash. If the two are not a JSON escape, the backslash is
        meant literally."""
        self._wanted = "string"
        if character in "ux":
            self._wanted = "hex"
            self._word = character
            self._num_hex = 4 if character == "u" else 2
        elif character in _ESCAPES:
            read.append(f"\\{character}")
        elif character == self._quote or character == "'":
            read.append(character)
        else:
            read.append("\\\\" if character >= " " else f"\\\\\\u{ord(character):04x}")
            read.append(character if character >= " " else "")

    def _hex(self, character: str, read: list[str]) -> None:
        """A digit of an escape, which is none where there are too few."""
        if character in _HEX:
            self._word += character
            if len(self._word) > self._num_hex:
                read.append(f"\\u{self._word[1:]:0>4}")
                self._wanted = "string"
            return
        read.append(f"\\\\{self._word}")
        self._wanted = "string"
        self._step(character, read)

    def _begin(self, character: str, read: list[str]) -> bool:
        """Takes in a character outside of strings and words."""
        wanted = self._wanted
        if wanted == "colon":
            self._wanted = "value"
            read.append(":")
            return character == ":"
        if character in _CLOSES.values():
            return self._close(character, read)
        if wanted == "comma":
            self._wanted = "key" if self._open[-1] == "}" else "value"
            self._comma = ","
            return character == ","
        is_key = wanted in ("key", "first key")
        if not (
            character in _QUOTES or _is_of_word(character) or (character in _CLOSES and not is_key)
        ):
            return False
        read.append(self._comma)
        self._comma = ""
        self._is_key = is_key
        if character in _QUOTES:
            self._wanted = "string"
            self._quote = _QUOTES[character]
            read.append('"')
        elif character in _CLOSES:
            self._open.append(_CLOSES[character])
            self._wanted = "first key" if character == "{" else "first value"
            read.append(_WRITTEN.get(character, character))
            return len(self._open) <= MAX_DEPTH
        else:
            self._wanted = "word"
            self._word = character
        return True

    def _close(self, bracket: str, read: list[str]) -> bool:
        """A bracket, which closes what is open in it too."""
        is_item = self._wanted == "value" and bool(self._comma)
        if bracket not in self._open or not (
            is_item or self._wanted in ("comma", "key", "first key", "first value")
        ):
            return False
        while self._open[-1] != bracket:
            self._pop(read)
        self._pop(read)
        self._end_value()
        return True

    def _pop(self, read: list[str]) -> None:
        """Closes the innermost. A comma before that is one too many."""
        bracket = self._open.pop()
        read.append(self._comma[1:] + _WRITTEN.get(bracket, bracket))
        self._comma = ""

    def _end_string(self) -> None:
        if self._is_key:
            self._end_key()
        else:
            self._end_value()

    def _end_key(self) -> None:
        self._wanted = "colon"
        self.is_done = not self._open

    def _end_word(self, read: list[str]) -> None:
        """A word is over: a key without quotes, or a number or a constant."""
        if self._is_key and self._word.isidentifier():
            read.append(json.dumps(self._word, ensure_ascii=False))
            self._end_key()
        elif not self._is_key and (value := literal(self._word)) is not None:
            read.append(value)
            self._end_value()
        else:
            self.is_wrong = True

    def _end_value(self) -> None:
        self._wanted = "comma"
        self.is_done = not self._open


def _is_of_word(character: str) -> bool:
    return character.isalnum() or character in "+-._"


def literal(word: str) -> str | None:
    """The JSON of a number, of true, false and null in any case, and of None. None if `word` is
    none of these."""
    constant = _WORDS.get(word.lower())
    return constant or _number(word)


def _number(word: str) -> str | None:
    """The JSON of a number, also where Python alone would take it: 1_000, +1, .5, 5. and -.5."""
    sign = "-" if word.startswith("-") else ""
    mantissa, has_exponent, exponent = (
        word.removeprefix("-" if sign else "+").lower().partition("e")
    )
    if has_exponent and not _are_digits(exponent[1:] if exponent[:1] in ("+", "-") else exponent):
        return None
    whole, point, fraction = mantissa.partition(".")
    groups = whole.split("_")
    whole = "".join(groups)
    if not (whole or fraction) or not all(map(_are_digits, groups if whole else ())):
        return None
    if (fraction and not _are_digits(fraction)) or (len(whole) > 1 and whole[0] == "0"):
        return None
    return f"{sign}{whole or '0'}{f'.{fraction or 0}' if point else ''}{has_exponent}{exponent}"


def _are_digits(text: str) -> bool:
    return text.isascii() and text.isdigit()


def read_json(text: str) -> str | None:
    """The JSON that a whole text means; None: it is none."""
    scanner = JsonScanner()
    at, read = scanner.feed(text, 0)
    read += scanner.end()
    return read if scanner.is_done and not text[at:].strip() else None
