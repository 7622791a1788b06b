"""What a layer asks of attention (AttentionSpec) and what it keeps in the cache (KVCacheSpec). Needs no torch."""

from __future__ import annotations

from enum import StrEnum

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


class AttentionSpec(Struct, frozen=True, kw_only=True):
    """All that a backend needs to know to say whether it can run a layer. Head counts are per rank."""

    layer: str
    type: AttentionType
    num_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    device: str
    """Device type: "cpu", "cuda", ..."""
    block_size: int | None
    """None: no cache."""
    window: int | None = None
    """Sliding window: a token at position p sees positions above p - window; in an encoder, also only those below p + window."""
    soft_cap: float | None = None
    """Scores s become soft_cap * tanh(s / soft_cap)."""
    sinks: bool = False
    """A learned logit per head joins the softmax's denominator."""
    bias: bool = False
    """An additive bias per head and pair of positions (ALiBi, T5)."""
    spans: bool = False
    """Spans of the sequence whose tokens see each other in both directions (images in a prompt)."""


class KVCacheSpec(Struct, frozen=True, kw_only=True):
    """What one layer keeps per token. Layers with equal specs form a KV group and share block tables."""

    kind: str
    """"full", "window", "cross", or a kind that a plugin adds."""
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    window: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one layer: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]

    def blocks_for(self, num_tokens: int, chunk: int) -> int:
        """Most blocks that a sequence of `num_tokens` holds at a time when at most `chunk` of them are computed in one step.

        With a window, blocks that no later token can see are given back before a step: what is left are those of the window before
        the chunk and of the chunk, plus one, since neither begins at a block's edge.
        """
        whole = -(-num_tokens // self.block_size)
        if self.window is None:
            return whole
        return min(whole, -(-(self.window - 1 + chunk) // self.block_size) + 1)
