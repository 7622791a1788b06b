"""bad_words: converts texts that an output must not contain to rules about tokens, for all tokens
that could spell them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np

from toolkit_lm.errors import RequestError
from toolkit_lm.messages import Array, ForbiddenTexts
from toolkit_lm.params import SamplingParams
from toolkit_lm.processing.validation import check_token_ids
from toolkit_lm.renderer import Renderer

MOST_RULES = 2**16
"""Most steps from token to token of one request's words together."""
_SPACELESS = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff"
    "\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts that put no spaces between words."""
_IN_WORD = rf"[^\W{_SPACELESS}]"
_BOUNDARY = re.compile(rf"(?s)(?:(?<!{_IN_WORD})|(?!{_IN_WORD}))(?=[^ ])")
"""Boundary between two characters that are not of the same word. Nothing begins with a space."""
_CONTINUED = re.compile(rf"{_IN_WORD}{{2}}")


class BadWordRules:
    """Converts words to rules about tokens. One instance serves all requests of an engine, from
    several threads."""

    def __init__(self, renderer: Renderer, vocab_size: int) -> None:
        """`vocab_size`: the model's; its logits have no more entries."""
        self._renderer = renderer
        self._vocab_size = vocab_size
        self._vocabularies: dict[bool, _Vocabulary] = {}
        self._lock = Lock()

    def of(self, params: SamplingParams) -> ForbiddenTexts | None:
        """Rules for a request's bad_words; None: it has none. Raises RequestError, which names the
        parameter."""
        if not params.bad_words:
            return None
        spellings = dict.fromkeys(
            spelling for word in params.bad_words for spelling in self._spellings(word.strip(" "))
        )
        with self._lock:
            vocabulary = self._vocabularies.get(params.skip_special_tokens)
            if vocabulary is None:
                size = min(self._vocab_size, self._renderer.vocab_size)
                pieces = self._renderer.token_bytes(
                    range(size), skip_special_tokens=params.skip_special_tokens
                )
                vocabulary = self._vocabularies[params.skip_special_tokens] = _Vocabulary(
                    pieces, self._vocab_size
                )
        return vocabulary.rules([spelling.encode() for spelling in spellings])

    def _spellings(self, word: str) -> Iterable[str]:
        """The word, and the texts that result if a tokenizer writes it differently, for instance in
        small letters."""
        try:
            token_ids = self._renderer.render_prompt(word, add_special_tokens=False).token_ids
        except RequestError as error:
            raise RequestError(
                f"bad_words: {word!r} cannot be tokenized: {error}", "bad_words"
            ) from None
        check_token_ids(token_ids, self._vocab_size, "bad_words")
        written = self._renderer.decode(token_ids)
        # An unknown token belongs to no word.
        is_text = written.strip() and written == self._renderer.decode(
            token_ids, skip_special_tokens=True
        )
        return (word, written.strip(" ")) if is_text else (word,)


class _Vocabulary:
    """The texts of all tokens, and their suffixes from a word boundary inside a token, where
    another word begins."""

    def __init__(self, pieces: Sequence[bytes], size: int) -> None:
        self.pieces = pieces
        # Ids beyond the last one have no text either.
        silent = np.ones((size // 8 + 1) * 8, bool)
        silent[: len(pieces)] = [not piece for piece in pieces]
        self.silent = Array.of(np.packbits(silent))
        self.whole = _SortedTexts(
            (piece, token_id) for token_id, piece in enumerate(pieces) if piece
        )
        self.inner = _SortedTexts(
            (text[match.start() :].encode("utf-8", "surrogateescape"), token_id)
            for token_id, piece in enumerate(pieces)
            for text in (piece.decode("utf-8", "surrogateescape"),)
            for match in _BOUNDARY.finditer(text, 1)
        )

    def rules(self, words: Sequence[bytes]) -> ForbiddenTexts:
        """Builds the automaton of the words. State 0 is before a word. Each word has a state for
        each of its bytes but the last."""
        steps: list[tuple[int, int, int]] = []
        ends: list[tuple[int, int]] = []
        first = 0
        for word in words:
            reached = {0}
            for start in range(len(word)):
                if start not in reached:
                    continue
                state = first + start if start else 0
                for texts in (self.whole, self.inner)[: 1 if start else 2]:
                    parts, wholes = texts.found(word[start:])
                    steps += [
                        (token_id, state, first + start + length) for length, token_id in parts
                    ]
                    reached.update(start + length for length, _ in parts)
                    ends += [
                        (state, token_id)
                        for text, token_id in wholes
                        if not _goes_on(word, text[len(word) - start :])
                    ]
                if len(steps) + len(ends) > MOST_RULES:
                    most = f"more than {MOST_RULES} rules about tokens"
                    raise RequestError(
                        f"bad_words: these {len(words)} words need {most}: give fewer, or "
                        "shorter ones.",
                        "bad_words",
                    )
            first += len(word)
        return ForbiddenTexts(
            steps=Array.of(np.array(sorted(set(steps)), np.int32).reshape(-1, 3)),
            ends=Array.of(np.array(sorted(set(ends)), np.int32).reshape(-1, 2)),
            silent=self.silent,
            longest=max(map(len, words)),
        )


class _SortedTexts:
    """Texts with their tokens, sorted, so that texts with the same beginning are adjacent."""

    def __init__(self, entries: Iterable[tuple[bytes, int]]) -> None:
        ordered = sorted(entries)
        self._texts = [text for text, _ in ordered]
        self._token_ids = [token_id for _, token_id in ordered]

    def found(self, rest: bytes) -> tuple[list[tuple[int, int]], Iterable[tuple[bytes, int]]]:
        """Returns tokens that are a prefix of `rest`, with the prefix's length; and tokens that
        begin with all of `rest`, with their texts."""
        texts = self._texts
        token_ids = self._token_ids
        parts = []
        start = 0
        end = len(texts)
        for length in range(1, len(rest) + 1):
            part = rest[:length]
            start = bisect_left(texts, part, start, end)
            # No byte of UTF-8 is 255.
            end = bisect_left(texts, part[:-1] + bytes([part[-1] + 1]), start, end)
            if start == end:
                break
            for index in range(start, end) if length < len(rest) else ():
                if len(texts[index]) > length:
                    break
                parts.append((length, token_ids[index]))
        return parts, zip(texts[start:end], token_ids[start:end], strict=True)


def _goes_on(word: bytes, more: bytes) -> bool:
    """Whether a token with the word's end continues the same word, which makes it another word."""
    return (
        bool(more)
        and _CONTINUED.match((word.decode()[-1:].encode() + more).decode("utf-8", "replace"))
        is not None
    )
