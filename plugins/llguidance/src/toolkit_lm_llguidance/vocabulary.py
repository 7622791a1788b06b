"""The vocabulary that grammars are compiled for: llguidance's, of a tokenizer.json."""

from __future__ import annotations

from threading import Lock
from typing import Any
from weakref import WeakValueDictionary

from llguidance import LLParserLimits, LLTokenizer
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.contract import Source

FUEL = 200_000
"""Limit of the work spent on the lexer of one grammar: some tenths of a second."""
FUEL_OF_A_MASK = 200_000
"""And with one mask: some hundredths."""


class Vocabulary:
    """A tokenizer as llguidance has it, shared by all that ask for the same one while any of them
    lives."""

    _known: WeakValueDictionary[Source, Vocabulary] = WeakValueDictionary()
    _lock = Lock()

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tokenizer = LLTokenizer(source.path, eos_token=list(source.eos_token_ids))
        self.size = self.tokenizer.vocab_size

    @classmethod
    def of(cls, source: Source) -> Vocabulary:
        """Raises ValueError for a tokenizer.json that llguidance cannot read."""
        with cls._lock:
            found = cls._known.get(source)
            if found is None:
                found = cls._known[source] = cls(source)
            return found

    def check(self, renderer: Any) -> None:
        """Raises RequestError where the renderer has other tokens than the tokenizer.json."""
        ids = list(range(0, min(self.size, renderer.vocab_size), max(1, self.size // 256)))
        pairs = zip(ids, renderer.token_texts(ids), strict=True)
        plain = [
            (self.tokenizer.decode_str([token]).strip(), text.strip())
            for token, text in pairs
            if not self.tokenizer.is_special_token(token)
        ]
        decodable = [
            (ours, theirs)
            for ours, theirs in plain
            if "\N{REPLACEMENT CHARACTER}" not in ours + theirs
        ]
        if sum(ours != theirs for ours, theirs in decodable) > len(decodable) // 10:
            raise RequestError(
                f"structured output: the tokens of {self.source.path} are not those of "
                f"{type(renderer).__name__}."
            )

    def special_tokens(self, text: str) -> list[str | int]:
        """A text as pieces of text, and the ids of special tokens between them."""
        pieces: list[str | int] = []
        for token_id in self.tokenizer.tokenize_str(text, parse_special=True):
            if self.tokenizer.is_special_token(token_id):
                before, mark, after = text.partition(self.tokenizer.decode_str([token_id]))
                if mark:
                    pieces += [before, token_id] if before else [token_id]
                    text = after
        return [*pieces, text] if text or not pieces else pieces


def limits() -> LLParserLimits:
    """Limits of work for one grammar."""
    return LLParserLimits(
        initial_lexer_fuel=FUEL, step_lexer_fuel=FUEL_OF_A_MASK, verbose_errors=False
    )
