"""Texts that openai-harmony can tokenize in a bounded time, and what it does where it cannot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit_lm.errors import ContextLengthError, RequestError

_LONG_RUN = re.compile(r"[^\W\d_]{1024,}|\s{1024,}|[^\w\s]{1024,}|_{1024,}")
"""Letters, spaces or signs that the tokenizer takes as one piece. Numbers are cut into pieces of
three."""
_MOST_PAIRS = 2**31
"""Sum of the squared lengths of long runs of characters: the library's time for a piece grows with
the square of its length. About a second."""


class TextBudget:
    """Limit on the total characters of one request's texts."""

    def __init__(self, label: str, max_chars: int) -> None:
        self._label = label
        self._max_chars = self._left = max_chars
        self._pairs = _MOST_PAIRS

    def spend(self, text: str, param: str) -> str:
        """The text. Raises RequestError, naming `param`, for too many characters, long runs, or
        half of a surrogate pair."""
        self._left -= len(text)
        if self._left < 0:
            raise ContextLengthError(
                f"{self._label} has more than {self._max_chars} characters; longer ones are not "
                "tokenized.",
                param,
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{self._label} is not a valid text: lone surrogate at position {error.start}.",
                param,
            ) from None
        self._pairs -= sum((run.end() - run.start()) ** 2 for run in _LONG_RUN.finditer(text))
        if self._pairs < 0:
            raise RequestError(
                f"{self._label} has tens of thousands of letters, spaces or signs in a row, which "
                "are not tokenized.",
                param,
            )
        return text


@contextmanager
def refusals(param: str) -> Iterator[None]:
    """Raises RequestError for `param` where openai-harmony fails within."""
    try:
        yield
    except RequestError:
        raise
    except BaseException as error:
        # HarmonyError, pydantic's errors, and a panic of Rust code, whose class cannot be imported.
        if not isinstance(error, RuntimeError | ValueError) and type(error).__module__ not in (
            "openai_harmony",
            "pyo3_runtime",
        ):
            raise
        raise RequestError(f"openai-harmony refuses this: {str(error)[:300]}", param) from error
