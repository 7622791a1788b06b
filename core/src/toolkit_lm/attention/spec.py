"""What a layer asks of attention (AttentionSpec) and what it keeps in the cache (KVCacheSpec).
Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import ClassVar

from msgspec import Struct

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


class AttentionType(StrEnum):
    """Which tokens a token can see."""

    DECODER = "decoder"
    """Itself and what came before it, through the KV cache."""
    ENCODER = "encoder"
    """All tokens of its own sequence in the batch; no cache."""
    CROSS = "cross"
    """All tokens of the request's encoder sequence, whose keys and values are cached."""


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
        return -(-num_tokens // self.block_size)

    def first_needed(self, num_tokens: int) -> int:
        """The first entry that the token after `num_tokens` can see. The blocks before it are given
        back."""
        return 0

    def max_blocks(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds at a time when at most `chunk` of them
        are computed in one step."""
        return self.num_blocks(num_tokens)


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
            self.num_blocks(num_tokens), -(-(self.window - 1 + chunk) // self.block_size) + 1
        )


class CrossSpec(FullSpec, frozen=True, kw_only=True, tag="cross"):
    """Keys and values of all tokens of an encoder sequence."""

    grows: ClassVar[bool] = False
    of_encoder: ClassVar[bool] = True


class AttentionSpec(Struct, frozen=True, kw_only=True):
    """All that a backend needs to know to say whether it can run a layer. Head counts are per
    rank."""

    layer: str
    type: AttentionType
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    device: str
    """Device type: "cpu", "cuda", ..."""
    kv_cache: KVCacheSpec | None
    """What the layer keeps; None: nothing is cached."""
    window: int | None = None
    """Sliding window: a token at position p sees positions above p - window; in an encoder, also
    only those below p + window."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    sinks: bool = False
    """A learned logit per head joins the softmax's denominator."""
    bias: bool = False
    """An additive bias per head and pair of positions (ALiBi, T5)."""
    offset_bias: bool = False
    """It is an `OffsetBias`."""
    spans: bool = False
    """The tokens of a span, an image's, see those after them in it too: `BatchView.spans`. A window
    holds all the same."""


def common_refusal(spec: AttentionSpec, dtypes: Sequence[str]) -> str | None:
    """Why no backend that caches keys and values, with kernels for these dtypes, can run the layer;
    None: one may.

    It is where `AttentionBackend.refuses` of most backends begins. They go on with what their own
    kernels lack.
    """
    if spec.dtype not in dtypes:
        return f"no kernel for {spec.dtype}, only for {', '.join(dtypes)}"
    if spec.type not in tuple(AttentionType):
        return f"no attention of type {spec.type!r}, only of {', '.join(AttentionType)}"
    if spec.kv_cache is not None and not isinstance(spec.kv_cache, FullSpec):
        return f"no layout for a cache of kind {spec.kv_cache.kind!r}, only for keys and values"
    asked = [name for name in ("window", "bias") if getattr(spec, name)]
    if spec.type is AttentionType.CROSS and asked:
        return (
            f"{' and '.join(asked)} {'relate' if len(asked) > 1 else 'relates'} positions of one "
            "sequence, and cross attention has two"
        )
    if spec.spans and spec.type is not AttentionType.DECODER:
        return f"spans are of decoders, and this is attention of type {str(spec.type)!r}"
    return None
