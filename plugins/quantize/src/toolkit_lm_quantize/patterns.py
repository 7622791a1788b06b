"""Patterns that name layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase

from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.model import LinearSpec


class Patterns:
    """Patterns of one option: a layer's name in the model or in the checkpoint, one with * and ?,
    or "re:" and a regular expression that matches all of it."""

    def __init__(self, option: str, patterns: Sequence[str]) -> None:
        self.option = option
        self.unmatched = set(patterns)
        self._seen: list[str] = []
        self._compiled: dict[str, re.Pattern[str] | None] = {}
        for pattern in patterns:
            try:
                found = re.compile(pattern[3:]) if pattern.startswith("re:") else None
            except re.error as error:
                raise ConfigError(
                    f"option {option!r}: {pattern!r} is no regular expression: {error}."
                ) from error
            self._compiled[pattern] = found

    def find(self, spec: LinearSpec) -> str | None:
        """The first pattern that names a layer. None: there is none.

        Raises UnsupportedError for one that names a part of what the layer packs.
        """
        self._seen.append(spec.prefix)
        sources = spec.sources or (spec.prefix,)
        for pattern in self._compiled:
            hits = [self._hits(pattern, source) for source in sources]
            if any(hits) and not all(hits) and not self._hits(pattern, spec.prefix):
                raise UnsupportedError(
                    f"option {self.option!r}: {pattern!r} names a part of {spec.prefix}, which "
                    f"holds {', '.join(sources)} together. Name all of them, or "
                    f"{spec.prefix!r}."
                )
            if all(hits) or self._hits(pattern, spec.prefix):
                self.unmatched.discard(pattern)
                return pattern
        return None

    def check(self) -> None:
        """Raises ConfigError for patterns that have named no layer."""
        if self.unmatched:
            pattern = min(self.unmatched)
            shown = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in self._seen))
            raise ConfigError(
                f"option {self.option!r}: {pattern!r} names no layer. Layers: "
                f"{', '.join(shown[:30])}."
            )

    def _hits(self, pattern: str, name: str) -> bool:
        compiled = self._compiled[pattern]
        return fnmatchcase(name, pattern) if compiled is None else bool(compiled.fullmatch(name))
