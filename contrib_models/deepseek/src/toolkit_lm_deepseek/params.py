"""LatentParams: what a backend is told of a layer with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from toolkit_lm.attention import LayerParams
from toolkit_lm.model import Kernels
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentParams(LayerParams):
    """Parameters of one layer for a backend. `head_size` is that of queries: their plain part, then
    their rotated part. The calls of a backend have

    * q [T, num_heads, head_size],
    * k and v, the same tensor [T, 1, rank + rotated_size]: the latents, then the rotated keys,
    * out [T, num_heads, value_size].
    """

    rank: int
    """Length of a latent."""
    rotated_size: int
    value_size: int
    weights: Callable[[], tuple[Tensor, Tensor]]
    """Returns the up-projections of this rank's heads: [num_heads, head_size - rotated_size, rank]
    to keys, and [num_heads, value_size, rank] to values."""
    expand: Callable[[Tensor], Tensor]
    """Latents [N, rank] -> [N, num_heads, head_size - rotated_size + value_size]: the plain parts
    of keys, then values."""

    kernels: Kernels
    """The model's."""

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
