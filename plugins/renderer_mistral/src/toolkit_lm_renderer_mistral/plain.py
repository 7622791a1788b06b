"""Plain copies: what a user gives, as JSON values of bounded size and depth."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.errors import ContextLengthError, RequestError

_ITEM = 8
"""Characters that an item of a list counts as."""
_MOST_DEPTH = 64


class PlainCopy:
    """Copies values that have `max_chars` characters together."""

    def __init__(self, max_chars: int) -> None:
        self._max_chars = max_chars
        self._left = max_chars

    def copy(self, value: Any, param: str, depth: int = 0) -> Any:
        """A copy of JSON types only. Raises RequestError for `param` where there is none, or it is
        too large."""
        if depth > _MOST_DEPTH:
            raise RequestError(f"{param} is nested more than {_MOST_DEPTH} levels deep.", param)
        self._spend(_ITEM, param)
        if value is None or type(value) in (int, float, bool):
            return value
        if isinstance(value, str):
            return self._text(value, param)
        if isinstance(value, Mapping):
            return {
                self._text(str(key), param): self.copy(item, param, depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.copy(item, param, depth + 1) for item in value]
        raise RequestError(
            f"{param} must hold JSON values only, not a {type(value).__name__}.", param
        )

    def _text(self, value: str, param: str) -> str:
        self._spend(len(value), param)
        check_unicode(value, param, param)
        return str.__str__(value)

    def _spend(self, size: int, param: str) -> None:
        self._left -= size
        if self._left < 0:
            raise ContextLengthError(
                f"the conversation has more than {self._max_chars} characters; longer ones are "
                "not tokenized.",
                param,
            )


def check_unicode(text: str, where: str, param: str) -> None:
    """Raises RequestError for half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{where} is not a valid text: lone surrogate at position {error.start}.", param
        ) from None
