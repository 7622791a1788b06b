"""Options of the plugin: `--plugin-option drafters.NAME=VALUE`. Imports no torch."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class Options(Struct, frozen=True, kw_only=True):
    """Options of all drafters. Each drafter reads its own, and `num_speculative_tokens`."""

    num_speculative_tokens: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Most drafts of a sequence in a step. None: 4."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: tokens of the shortest n-gram that is looked up. None: 2, or prompt_lookup_max if
    that is less."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: tokens of the longest n-gram that is looked up. None: 5, or prompt_lookup_min if that
    is more."""

    def __post_init__(self) -> None:
        if None not in (self.prompt_lookup_min, self.prompt_lookup_max):
            shortest, longest = self.lookup
            if shortest > longest:
                raise ValueError(
                    f"prompt_lookup_min ({shortest}) is more than prompt_lookup_max ({longest})"
                )

    @property
    def lookup(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest n-gram."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None:
            shortest = min(2, longest or 2)
        return shortest, max(5, shortest) if longest is None else longest

    @property
    def num_drafts(self) -> int:
        """`num_speculative_tokens`, or its default."""
        return self.num_speculative_tokens or 4
