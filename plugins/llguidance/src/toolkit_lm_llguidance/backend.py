"""llguidance as a structured output backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from toolkit_lm.errors import RequestError
from toolkit_lm_structured_output.checks import schema_of
from toolkit_lm_structured_output.contract import (
    NOTHING,
    GrammarCompiler,
    Matcher,
    Reading,
    Source,
    WishReader,
)
from toolkit_lm_structured_output.wishes import Wish

from toolkit_lm_llguidance.grammars import grammar_of, grammar_of_schema, options_of
from toolkit_lm_llguidance.locating import locate
from toolkit_lm_llguidance.vocabulary import FUEL, FUEL_OF_A_MASK, Vocabulary, limits

_LOCATING = 0.25
"""Seconds of computing, to say where a schema cannot be used."""
_OUT_OF_FUEL = "too many expressions constructed"
_TOO_MANY = (
    f"its regular expressions take more than {FUEL:,} steps at first, or {FUEL_OF_A_MASK:,} with "
    "a token; "
    "the usual reason is a repetition of repetitions that do not say where one ends, such as "
    "([a-z]{1,50}){1,500}: "
    "bound them more tightly, or put a separator between them"
)


class LLGuidanceReader(WishReader):
    compiler = "toolkit_lm_llguidance.backend:LLGuidanceCompiler"

    def __init__(self, source: Source, renderer: Any) -> None:
        super().__init__(source, renderer)
        try:
            self._vocabulary = Vocabulary.of(source)
        except ValueError as error:
            raise RequestError(
                f"structured output: llguidance cannot read {source.path}: {error}"
            ) from None
        self._vocabulary.check(renderer)

    def read(self, wish: Wish) -> Reading:
        schema = schema_of(wish)
        details = None if schema is None else {"schema": schema, "options": options_of(wish)}
        return Reading(grammar_of(wish, self._vocabulary.special_tokens), details)


class LLGuidanceMatcher(Matcher):
    def __init__(self, matcher: LLMatcher) -> None:
        """Raises ValueError for one that has failed."""
        self.matcher = matcher
        self.check()

    def check(self) -> None:
        """Raises ValueError."""
        if self.matcher.is_error():
            message = (
                self.matcher.get_error()
                .removesuffix("<non-verbose/>")
                .strip()
                .replace("NoExtensionBias", NOTHING)
            )
            raise ValueError(_TOO_MANY if _OUT_OF_FUEL in message else message)

    def copy(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self.matcher.deep_copy())

    def consume(self, token_id: int) -> None:
        self.matcher.consume_token(token_id)
        self.check()

    def fill(self, mask: np.ndarray) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()

    def forced(self) -> list[int]:
        return self.matcher.compute_ff_tokens()

    @property
    def is_stopped(self) -> bool:
        return self.matcher.is_stopped()


class LLGuidanceCompiler(GrammarCompiler):
    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._vocabulary = Vocabulary.of(source)
        self._executor = LLExecutor()

    @property
    def size(self) -> int:
        return self._vocabulary.size

    @cached_property
    def token_lengths(self) -> np.ndarray:
        decode = self._vocabulary.tokenizer.decode_bytes
        return np.array([len(decode([token])) for token in range(self.size)])

    def compile(self, grammar: str) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(
            LLMatcher(self._vocabulary.tokenizer, grammar, log_level=0, limits=limits())
        )

    def fill(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        if len(matchers) == 1:
            matchers[0].fill(masks[0])
            return
        ours = cast("Sequence[LLGuidanceMatcher]", matchers)
        fill_next_token_bitmask_par(
            self._executor, [(matcher.matcher, index) for index, matcher in enumerate(ours)], masks
        )
        for matcher in ours:
            matcher.check()

    def error_of(self, grammar: str, details: Any) -> str:
        """With the part of the schema that is to blame."""
        message = self.tried(grammar)
        if not message or details is None:
            return message
        end = time.process_time() + _LOCATING

        def of_part(schema: dict[str, Any]) -> str:
            return (
                ""
                if time.process_time() > end
                else self.tried(grammar_of_schema(schema, details["options"]))
            )

        message_of = cast("Callable[[dict[str, Any]], str]", of_part)
        return f"{message} (at {locate(details['schema'], message, message_of)[:200]})"
