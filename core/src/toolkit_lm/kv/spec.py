"""Specs of the state that a layer caches per sequence. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import ClassVar, Literal, NamedTuple

from msgspec import Struct

DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


class PageTensor(NamedTuple):
    """A tensor in a layer's page of the cache."""

    shape: tuple[int, ...]
    """Shape for one block."""
    dtype: str


class KVCacheSpec(Struct, frozen=True, kw_only=True, tag_field="kind"):
    """Description of the state that one layer caches per sequence, in blocks. Layers with equal
    specs form a KV group, and share block tables.

    Each kind is a subclass with its own tag. `toolkit_register_kv_kinds` registers a plugin's kind.
    A step writes the blocks of the tokens that it computes. Only the layer and its backend read a
    block's contents: a recurrent state is a block of max_model_len tokens.
    """

    caches_prefixes: ClassVar[bool] = True
    """A block's contents depend only on the tokens up to its end. Other sequences with these tokens
    can use it."""
    forks_anywhere: ClassVar[bool] = True
    """A fork can begin at any computed token. False: only at its parent's last computed token."""
    shared_within_step: ClassVar[bool] = True
    """Other sequences of the step that writes a block can read it. False: only from the next step
    on."""
    grows: ClassVar[bool] = True
    """A sequence takes further blocks as it grows. False: it keeps the number of blocks that it
    starts with."""
    of_encoder: ClassVar[bool] = False
    """The state belongs to a request's encoder sequence, and all sequences of the request share it.
    One step writes it, and later ones only read it."""

    block_size: int
    """Tokens per block."""
    rewinds: int = 0
    """Number of last tokens that a sequence can take back. Applies only if `forks_anywhere` is
    False: other kinds can overwrite any token."""
    lag: int = 0
    """Number of tokens by which the state trails, for instance in a drafter's layers. If n tokens
    are computed, it holds the first n - lag, and the next step continues from there. The entry of a
    token may depend on that many tokens after it."""
    snapshots: int = 0
    """Number of tokens between positions where a copy of the block can be kept, for other sequences
    to begin from; 0: no copies are kept. For kinds without `caches_prefixes`, whose one block every
    step writes."""
    lookahead: int = 0
    """Number of slots beyond a step's tokens. A second pass over the step (`StepRun.forward`)
    writes there."""

    @property
    def kind(self) -> str:
        """Name of the kind: "full", "window", or one that a plugin adds."""
        return str(self.__struct_config__.tag)

    @property
    def shares_prefixes(self) -> bool:
        """Other sequences can begin from what it keeps of a prompt."""
        return self.caches_prefixes or (self.snapshots > 0 and not self.lag)

    def stops_at(self, start: int, num_prompt_tokens: int, border: int) -> int:
        """Number of tokens after which a step must end, so that a snapshot can be kept there.

        The step begins at token `start` of a prompt. 0: it may end anywhere. Otherwise a multiple
        of `border` greater than `start`; cached prefixes of the model end at such multiples. By
        default once: at the last border before the prompt's last token.
        """
        last = (num_prompt_tokens - 1) // border * border
        return last if last > start else 0

    @property
    def page_bytes(self) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError(f"{type(self).__name__} must define page_bytes")

    def num_blocks(self, num_tokens: int) -> int:
        """Number of block table entries of a sequence with this many computed tokens."""
        return -(-(num_tokens + self.lookahead) // self.block_size)

    def first_needed(self, num_tokens: int) -> int:
        """Index of the first entry that the token after `num_tokens` can see. Blocks before it are
        freed."""
        return 0

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds at a time if a step computes at most
        `chunk` of them."""
        return self.num_blocks(num_tokens)


def max_drafts(specs: Iterable[KVCacheSpec]) -> int:
    """Most drafts of a sequence that a step may compute, since rejected drafts are taken back."""
    return min((spec.rewinds for spec in specs if not spec.forks_anywhere), default=sys.maxsize)


class FullSpec(KVCacheSpec, frozen=True, kw_only=True, tag="full"):
    """Keys and values of all tokens."""

    num_kv_heads: int
    head_size: int
    dtype: str
    scales: Literal["none", "layer", "token"] = "none"
    """Scales that keys and values are divided by before they are stored. "layer": the layer's
    `k_scale` and `v_scale`, which the checkpoint holds. "token": a float32 for each token and head,
    which the page holds."""

    @property
    def page_bytes(self) -> int:
        scales = 4 if self.scales == "token" else 0
        head_bytes = self.head_size * DTYPE_BYTES[self.dtype] + scales
        return 2 * self.block_size * self.num_kv_heads * head_bytes


class WindowSpec(FullSpec, frozen=True, kw_only=True, tag="window"):
    """Keys and values of the last `window` tokens."""

    window: int

    def first_needed(self, num_tokens: int) -> int:
        return max(0, num_tokens - self.window + 1) // self.block_size

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        # The blocks of the window before the chunk and of the chunk, and one more, since neither
        # begins at a block boundary.
        return min(
            self.num_blocks(num_tokens),
            -(-(self.window - 1 + chunk + self.lookahead) // self.block_size) + 1,
        )


class CrossSpec(FullSpec, frozen=True, kw_only=True, tag="cross"):
    """Keys and values of all tokens of an encoder sequence."""

    grows: ClassVar[bool] = False
    of_encoder: ClassVar[bool] = True
