"""Cuts long texts where their tokenizer splits them anyway: the tokens of the pieces, one after the
other, are those of the whole.

An encoding takes some 150 bytes a token. Of a long text no more than a piece is encoded at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

from toolkit_lm_renderer_hf.panic import is_panic

PIECE = 1 << 16
_WINDOW = 512
"""Characters before the end of a piece among which a place is looked for."""
_TRIES = 16
"""Places of these that are looked at."""

_NORMALIZERS = frozenset(
    {
        "BertNormalizer",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "StripAccents",
    }
)
"""They change characters one by one, or with their marks."""
_PRE_TOKENIZERS = frozenset(
    {"BertPreTokenizer", "ByteLevel", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}
)
"""None of them makes a word that goes from a letter over a space, or looks back."""
_SPACES = ({"Regex": " {2,}"}, {"Regex": r"\s+"})
"""Patterns that a normalizer may replace."""

_TOKEN = re.compile(
    r"(?P<blank>\\s\+\+?(?:\(\?!\\S\)|\$))"
    r"|(?P<open>\(\?i?:)"
    r"|(?P<close>\)(?:\?[?+]?|(?P<repeated>[*+{]))?)"
    r"|(?P<bar>\|)"
    r"|(?P<atom>\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^a-zA-Z0-9]"
    r"|\[\^?(?:\\[^xuUoc0-9]|[^\]\[\\])+\]|[^\\\[\](){}|?*+.^$])"
    r"(?P<times>(?:[?*+]|\{\d+(?:,\d*)?\})?[?+]?)"
)
"""Regular expressions that are safe to cut for: no lookbehind and no anchor. Lookahead sees at most
the next character after spaces."""


class Cutter:
    """Cuts the texts of one tokenizer. One whose words may go over a space, as those of a model
    that splits no words, is not cut for."""

    def __init__(self, tokenizer: Tokenizer, size: int = PIECE) -> None:
        """`size`: characters of a piece, about. A text that is not longer is not cut."""
        self._tokenizer = tokenizer
        self._size = size

    def pieces(self, text: str) -> Iterator[str]:
        """One after the other they are the text."""
        start = 0
        if len(text) > self._size and self._is_safe:
            for end in range(self._size, len(text), self._size):
                if (place := self._place(text, max(start, end - _WINDOW), end)) is not None:
                    yield text[start:place]
                    start = place
        yield text[start:]

    def _place(self, text: str, start: int, end: int) -> int | None:
        """Position where a piece may end: after a letter, and before a space and another letter."""
        places = [
            at
            for at in range(start + 1, end)
            if text[at] == " " and text[at - 1].isalpha() and text[at + 1].isalpha()
        ]
        for number in range(len(places) - 2, max(0, len(places) - 2 - _TRIES), -1):
            before, place, after = places[number - 1 : number + 2]
            if self._splits(text[before:place], text[place:after]):
                return place
        return None

    def _splits(self, left: str, right: str) -> bool:
        """Whether a word ends between these texts, which begin with a space each, and end before
        one."""
        try:
            whole, first, second = map(self._normalized, (left + right, left, right))
            if whole != first + second or not (
                first[-1:].isalpha() and second[:1] == " " and second[1:2].isalpha()
            ):
                return False
            if self._added_tokens.search(left + right) or self._added_tokens.search(whole):
                return False
            return self._words(whole) == self._words(first) + self._words(second)
        except UnicodeEncodeError:  # no valid text: it will be refused
            return False
        except BaseException as error:
            if is_panic(error):
                return False
            raise

    def _normalized(self, text: str) -> str:
        normalizer = self._tokenizer.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def _words(self, text: str) -> list[str]:
        splitter = self._tokenizer.pre_tokenizer
        assert splitter is not None, "it is safe"
        return [word for word, _ in splitter.pre_tokenize_str(text)]

    @cached_property
    def _added(self) -> list[str]:
        """The texts of added tokens: as they are stated, and as they are after normalization."""
        tokens = list(self._tokenizer.get_added_tokens_decoder().values())
        found = {token.content for token in tokens} | {
            self._normalized(token.content) for token in tokens if token.normalized
        }
        return sorted(found - {""})

    @cached_property
    def _added_tokens(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._added)) or r"(?!)")

    @cached_property
    def _is_safe(self) -> bool:
        """No part of the tokenizer makes more of a letter and a space after it than of each by
        itself."""
        tokenizer = self._tokenizer
        if tokenizer.pre_tokenizer is None or getattr(tokenizer.model, "dropout", None):
            return False
        if any(re.search(r"[^\W\d_] ", content) for content in self._added):
            return False
        return (
            tokenizer.normalizer is None or _is_safe_normalizer(_state(tokenizer.normalizer))
        ) and _is_safe_splitter(_state(tokenizer.pre_tokenizer))


def _state(part: Any) -> Mapping[str, Any]:
    """State of one part of a tokenizer, in tokenizer.json's form."""
    state: Mapping[str, Any] = json.loads(part.__getstate__())
    return state


def _is_safe_normalizer(state: Mapping[str, Any]) -> bool:
    if state["type"] == "Sequence":
        return all(map(_is_safe_normalizer, state["normalizers"]))
    return state["type"] in _NORMALIZERS or (
        state["type"] == "Replace" and state["pattern"] in _SPACES and state["content"] == " "
    )


def _is_safe_splitter(state: Mapping[str, Any]) -> bool:
    if state["type"] == "Sequence":
        parts = state["pretokenizers"]
        # After it a space is a letter of another kind.
        is_last = all(
            part["type"] != "ByteLevel" or part.get("use_regex", True) for part in parts[:-1]
        )
        return is_last and all(map(_is_safe_splitter, parts))
    if state["type"] == "Metaspace":
        return bool(state.get("split", True))
    if state["type"] != "Split":
        return state["type"] in _PRE_TOKENIZERS
    if state["behavior"] not in ("Isolated", "Removed"):
        return False
    pattern = state["pattern"]
    return " " not in pattern["String"] if "String" in pattern else stays_in_words(pattern["Regex"])


def stays_in_words(pattern: str) -> bool:
    """Whether no match of a regular expression has a space after a letter, and none depends on what
    is beyond.

    That is so where in each alternative only the first character, or a run of spaces that begins
    it, can be a space. Of other syntax than tokenizers have, False.
    """
    position = 0
    depth = 0
    is_first = True
    while position < len(pattern):
        found = _TOKEN.match(pattern, position)
        if found is None or found["repeated"]:
            return False
        position = found.end()
        if found["open"]:
            depth, is_first = depth + 1, False
        elif found["close"]:
            depth -= 1
        elif found["bar"]:
            is_first = depth == 0
        elif found["blank"]:
            if not is_first or pattern[position : position + 1] not in ("", "|"):
                return False
        else:
            once = found["times"] in ("", "?", "?+") or found["atom"] in (r"\s", " ")
            if _matches_space(found["atom"]) and not (is_first and once):
                return False
            is_first = False
    return depth == 0


def _matches_space(atom: str) -> bool:
    """Whether it can be U+0020: the package that will match it is asked."""
    return not pre_tokenizers.Split(Regex(atom), "removed").pre_tokenize_str(" ")
