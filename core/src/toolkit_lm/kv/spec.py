"""What a layer keeps of a sequence in the KV cache. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

from msgspec import Struct

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class PageTensor(NamedTuple):
    """A tensor in a layer's page of the cache."""

    shape: tuple[int, ...]
    """For one block."""
    dtype: str


class KVCacheSpec(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """What one layer keeps of a sequence, in blocks. Layers with equal specs form a KV group and
    share block tables.

    Each kind is a subclass with a tag of its own; `toolkit_register_kv_kinds` makes a plugin's kind
    known. A step writes the blocks of the tokens that it computes. What is in a block is between
    the layer and its backend: a recurrent state is a block of max_model_len tokens.
    """

    caches_prefixes: ClassVar[bool] = True
    """A block's content depends on the tokens up to its end alone, so that other sequences with
    these tokens can use it."""
    forks_anywhere: ClassVar[bool] = True
    """A fork can begin at any computed token. False: only where its parent stands."""
    shared_within_step: ClassVar[bool] = True
    """Other sequences of the step that writes a block can read it. False: from the next step on."""
    grows: ClassVar[bool] = True
    """A sequence takes further blocks as it grows. False: those of its beginning are all."""
    of_encoder: ClassVar[bool] = False
    """It is kept of a request's encoder sequence, once for all of the request's sequences. One step
    writes it; then it is only read."""

    block_size: int
    """Tokens per block."""
    rewinds: int = 0
    """How many of the last tokens a sequence can take back. It counts where `forks_anywhere` is
    False: other kinds write over any."""
    lag: int = 0
    """Tokens by which it trails, as a drafter's layers may: of n computed tokens it holds the first
    n - lag. A step goes on writing from there. What is written for a token may depend on as many
    tokens after it."""
    lookahead: int = 0
    """How many slots beyond the tokens of a step it has: a second pass over the step writes there
    (`StepRun.forward`)."""

    @property
    def kind(self) -> str:
        """Name of the kind: "full", "window", or one that a plugin adds."""
        return str(self.__struct_config__.tag)

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} must define page_bytes")

    def num_blocks(self, num_tokens: int) -> int:
        """Entries of the block table of a sequence with so many computed tokens."""
        return -(-(num_tokens + self.lookahead) // self.block_size)

    def first_needed(self, num_tokens: int) -> int:
        """The first entry that the token after `num_tokens` can see. The blocks before it are given
        back."""
        return 0

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds at a time when at most `chunk` of them
        are computed in one step."""
        return self.num_blocks(num_tokens)


def max_drafts(specs: Iterable[KVCacheSpec]) -> int:
    """Most drafts that a step may compute of a sequence, since what is not drawn is taken back."""
    return min((spec.rewinds for spec in specs if not spec.forks_anywhere), default=sys.maxsize)


class FullSpec(KVCacheSpec, frozen=True, kw_only=True, tag="full"):
    """Keys and values of all tokens."""

    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def page_bytes(self) -> int:
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


class WindowSpec(FullSpec, frozen=True, kw_only=True, tag="window"):
    """Keys and values of the last `window` tokens."""

    window: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1) // self.block_size

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        # Those of the window before the chunk and of the chunk, plus one, since neither begins at a
        # block's edge.
        return min(
            self.num_blocks(num_tokens),
            -(-(self.window - 1 + chunk + self.lookahead) // self.block_size) + 1,
        )


class CrossSpec(FullSpec, frozen=True, kw_only=True, tag="cross"):
    """Keys and values of all tokens of an encoder sequence."""

    grows: ClassVar[bool] = False
    of_encoder: ClassVar[bool] = True
