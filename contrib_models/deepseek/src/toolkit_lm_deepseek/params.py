"""LatentParams: what a backend is told of a layer with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from toolkit_lm.attention import LayerParams
from toolkit_lm.model import Kernels
from toolkit_lm_hybrid.blocks import HeadProduct
from torch import Tensor


class IndexShape(NamedTuple):
    """Sizes of a layer's indexer."""

    num_heads: int
    size: int
    """Of its keys, and of a head of its queries."""


class Choice:
    """Keys that an indexer chose in this step, for its layer and for those that share it."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        """Most keys that a query sees."""
        self.buckets: dict[int, Tensor] = {}
        """By number of a bucket: numbers [R, top_k] of each row's keys, in order."""
        self.rows: dict[int, Tensor] = {}
        """By number of a row of several tokens: keys that are not seen [T, K]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentParams(LayerParams):
    """Parameters of one layer for a backend. `head_size` is that of queries: their plain part, then
    their rotated part. The calls of a backend have

    * q [T, num_heads, head_size],
    * k and v, the same tensor [T, 1, rank + rotated_size]: the latents, then the rotated keys,
    * out [T, num_heads, value_size].

    With an indexer, its key follows in k [T, 1, ...], and v is what it looks for: its queries [T,
    index heads * index size], and the weight of each head [T, index heads], in one tensor.
    """

    rank: int
    """Length of a latent."""
    rotated_size: int
    value_size: int
    weights: Callable[[], tuple[HeadProduct, HeadProduct]]
    """Returns products by this rank's heads with the up-projections. Queries [num_heads, T,
    head_size - rotated_size] become [num_heads, T, rank]. Sums of latents of that shape become
    values [num_heads, T, value_size]."""
    expand: Callable[[Tensor], Tensor]
    """Latents [N, rank] -> [N, num_heads, head_size - rotated_size + value_size]: the plain parts
    of keys, then values."""

    kernels: Kernels
    """The model's."""
    index: IndexShape | None = None
    """The layer's own indexer."""
    choice: Choice | None = None
    """What an indexer chose, its own or another layer's. None: a query sees all keys before it."""

    @property
    def width(self) -> int:
        """Length of what is cached of a token, but for an indexer's key."""
        return self.rank + self.rotated_size

    @property
    def plain_size(self) -> int:
        """Dimensions of a query that are not rotated."""
        return self.head_size - self.rotated_size

    def expands(self, num_queries: int, num_keys: int) -> bool:
        """Whether it takes fewer products to make keys and values of all latents than to take the
        queries, and the sums of latents, through the up-projections."""
        projection = self.rank * (self.plain_size + self.value_size)
        saved = 2 * self.rank - self.plain_size - self.value_size
        return num_queries > 1 and num_queries * (num_keys * saved + projection) > (
            num_keys * projection
        )
