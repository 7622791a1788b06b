"""Grammars in Lark of texts, made those of the same texts between the quotes of JSON.

Control characters stay as they are, which parsers here take: a new line ends a lexeme, and the
backslash of an escape would not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from toolkit_lm.errors import RequestError

_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)
    |(?P<range>"(?:\\.|[^"\\\n])*"\s*\.\.\s*"(?:\\.|[^"\\\n])*")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<any_case>i?)
    |/(?P<regex>(?:\\.|\[(?:\\.|[^\]\\\n])*\]|[^/\\\n\[])+)/(?P<flags>[a-z]*)
    |(?P<directive>%[a-z]+)(?:[ ]+common\.(?P<name>[A-Z_]+)[ ]*(?:->[ ]*(?P<alias>\w+))?)?
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_HEADER = re.compile(r"\(\?(?:P?<\w+>|[a-z]*:)")
_HEX = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|[xu]\{([0-9a-fA-F]{1,6})\}")
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
}
"""Terminals of Lark's library that JSON writes otherwise, or llguidance does not have."""
_LAST = 0x10FFFF
_SPECIAL = (ord('"'), ord("\\"))
"""Characters that JSON escapes."""
Ranges = list[tuple[int, int]]
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_DIGIT: Ranges = [(0x30, 0x39)]
_SETS: dict[str, Ranges] = {
    "d": _DIGIT,
    "w": [*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)],
    "s": [(0x09, 0x0D), (0x20, 0x20)],
}


def escaped(lark: str) -> str:
    """The grammar of a text's JSON, without quotes around it. Raises RequestError for what cannot
    be written so."""
    written = []
    for match in _TOKEN.finditer(lark):
        found = match.groupdict()
        if found["text"] is not None:
            text = json.dumps(_escape(_read(found["text"])), ensure_ascii=False)
            written.append(text + found["any_case"])
        elif found["range"] is not None:
            first, last = (ord(_read(text)) for text in re.split(r"\s*\.\.\s*", found["range"]))
            written.append(f"/{_class([(first, last)])}/")
        elif found["regex"] is not None:
            flags = found["flags"]
            regex = _Regex(found["regex"], dot_is_all="s" in flags).written()
            written.append(f"/{regex}/{flags.replace('s', '')}")
        elif found["directive"] is not None:
            written.append(_directive(match[0], found["directive"], found["name"], found["alias"]))
        elif found["comment"] is None:
            written.append(match[0])
    return "".join(written)


def _wrong(found: str) -> RequestError:
    return RequestError(
        f"tools: the grammar of a custom tool has {found}, which this model's calls, in JSON, "
        "cannot be held to. Write it as texts and regular expressions.",
        "tools",
    )


def _read(literal: str) -> str:
    try:
        text: str = json.loads(literal)
    except ValueError:
        raise _wrong(f"the text {literal[:50]}") from None
    return text


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _directive(whole: str, directive: str, name: str | None, alias: str | None) -> str:
    if directive == "%import" and name in _COMMON:
        return f"{alias or name}: /{_Regex(_COMMON[name], dot_is_all=False).written()}/"
    if directive in ("%import", "%ignore", "%llguidance"):
        return whole
    raise _wrong(directive)


class _Regex:
    """Writes one regular expression anew: each character and each class as JSON has it."""

    def __init__(self, regex: str, *, dot_is_all: bool) -> None:
        self._regex = regex
        self._at = 0
        newline = ord("\n")
        self._dot: Ranges = [(0, _LAST)] if dot_is_all else [(0, newline - 1), (newline + 1, _LAST)]

    def written(self) -> str:
        return "".join(self._atoms())

    def _atoms(self) -> Iterator[str]:
        regex = self._regex
        while self._at < len(regex):
            character = regex[self._at]
            if header := _HEADER.match(regex, self._at):
                self._at = header.end()
                yield header[0]
                continue
            if regex.startswith("(?", self._at):
                raise _wrong(f"{regex[self._at : self._at + 4]!r}")
            self._at += 1
            if character == "\\":
                yield _class(self._escape())
            elif character == ".":
                yield _class(self._dot)
            elif character == "[":
                yield _class(self._class())
            elif character in "()|*+?^$" or character == "}":
                yield character
            elif character == "{":
                yield character
                while self._at < len(regex) and regex[self._at] in "0123456789,":
                    yield regex[self._at]
                    self._at += 1
            else:
                yield _class([(ord(character), ord(character))])

    def _escape(self) -> Ranges:
        """Meaning of an escape, whose backslash was read."""
        if found := _HEX.match(self._regex, self._at):
            self._at = found.end()
            code = int(next(group for group in found.groups() if group), 16)
            return [(code, code)]
        letter = self._regex[self._at : self._at + 1]
        self._at += 1
        if letter.lower() in _SETS:
            ranges = _SETS[letter.lower()]
            return ranges if letter.islower() else _complement(ranges)
        if not letter or (letter.isalnum() and letter not in _LETTERS):
            raise _wrong(f"'\\{letter}'")
        code = ord(_LETTERS.get(letter, letter))
        return [(code, code)]

    def _class(self) -> Ranges:
        """Meaning of a class, whose bracket was read."""
        regex = self._regex
        negated = regex.startswith("^", self._at)
        self._at += negated
        found: Ranges = []
        start = self._at
        while not (regex.startswith("]", self._at) and self._at > start):
            if self._at >= len(regex) or regex.startswith(("[:", "&&", "--", "~~"), self._at):
                raise _wrong(f"the class {regex[start - 1 - negated : start + 20]!r}")
            item = self._item()
            if (
                len(item) == 1
                and item[0][0] == item[0][1]
                and regex.startswith("-", self._at)
                and not regex.startswith("-]", self._at)
            ):
                self._at += 1
                item = [(item[0][0], self._item()[0][0])]
            found += item
        self._at += 1
        return _complement(found) if negated else found

    def _item(self) -> Ranges:
        character = self._regex[self._at]
        self._at += 1
        return self._escape() if character == "\\" else [(ord(character), ord(character))]


def _complement(ranges: Ranges) -> Ranges:
    found: Ranges = []
    begin = 0
    for first, last in sorted(ranges):
        if begin < first:
            found.append((begin, first - 1))
        begin = max(begin, last + 1)
    return [*found, (begin, _LAST)] if begin <= _LAST else found


def _class(ranges: Ranges) -> str:
    """An expression for one character of these, as JSON writes it."""
    special = [code for code in _SPECIAL if any(first <= code <= last for first, last in ranges)]
    no_special = _complement([(code, code) for code in _SPECIAL])
    plain = [
        (max(first, begin), min(last, end))
        for first, last in sorted(ranges)
        for begin, end in no_special
        if max(first, begin) <= min(last, end)
    ]
    options = [re.escape(_escape(chr(code))) for code in special]
    if len(plain) == 1 and plain[0][0] == plain[0][1] and not options:
        return _quoted(plain[0][0])
    if plain:
        listed = "".join(
            _code(first) if first == last else f"{_code(first)}-{_code(last)}"
            for first, last in plain
        )
        options.insert(0, f"[{listed}]")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _quoted(code: int) -> str:
    character = chr(code)
    return character if character.isalnum() or character in " _" else _code(code)


def _code(code: int) -> str:
    return f"\\x{{{code:x}}}"
