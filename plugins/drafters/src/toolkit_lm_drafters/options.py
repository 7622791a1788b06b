"""Options of the plugin: `--plugin-option drafters.NAME=VALUE`. Imports no torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct
from toolkit_lm.config import parse_memory


class Options(Struct, frozen=True, kw_only=True):
    """Options of all drafters. Each drafter reads its own, and `num_speculative_tokens`."""

    num_speculative_tokens: Annotated[int, Meta(ge=1, le=128)] | None = None
    """Most drafts of a sequence in a step. None: 4; ngram and suffix: 16."""
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: tokens of the shortest n-gram that is looked up. None: 2, or prompt_lookup_max if
    that is less."""
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] | None = None
    """ngram: tokens of the longest n-gram that is looked up. None: 16, or prompt_lookup_min if
    that is more."""
    suffix_decoding_max_spec_factor: Annotated[float, Meta(gt=0, le=64)] = 1.0
    """suffix: drafts per token of the match that they follow."""
    suffix_decoding_min_token_prob: Annotated[float, Meta(ge=0, le=1)] = 0.1
    """suffix: a draft ends before its probability, by what followed earlier matches, is less."""
    suffix_decoding_max_tree_depth: Annotated[int, Meta(ge=2, le=256)] = 24
    """suffix: tokens of the longest match."""
    suffix_memory: str = "64MiB"
    """suffix: memory for the outputs of finished requests. "0": drafts come from the request's own
    tokens alone."""

    model: str | None = None
    """draft_model: the draft model, a folder, a hub id, or a name that a plugin registers. eagle:
    the head's folder."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """draft_model: its dtype. None: the target's."""
    quantization: str | None = None
    """draft_model: its quantization, as the engine's option. None: the checkpoint's own."""

    def __post_init__(self) -> None:
        if isinstance(parse_memory(self.suffix_memory), float):
            raise ValueError(
                f"suffix_memory is a number of bytes, such as 64MiB, not {self.suffix_memory}"
            )
        if None not in (self.prompt_lookup_min, self.prompt_lookup_max):
            shortest, longest = self.lookup
            if shortest > longest:
                raise ValueError(
                    f"prompt_lookup_min ({shortest}) is more than prompt_lookup_max ({longest})"
                )

    @property
    def lookup(self) -> tuple[int, int]:
        """Tokens of the shortest and of the longest n-gram."""
        shortest = self.prompt_lookup_min
        longest = self.prompt_lookup_max
        if shortest is None:
            shortest = min(2, longest or 2)
        return shortest, max(16, shortest) if longest is None else longest

    @property
    def num_drafts(self) -> int:
        """`num_speculative_tokens`, or its default."""
        return self.num_speculative_tokens or 4
