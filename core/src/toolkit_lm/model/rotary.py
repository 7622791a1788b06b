"""The rotation of queries and keys by their positions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from toolkit_lm.model.kernels import Kernels


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation of T tokens. Made once per step, and used by every layer."""

    cos: Tensor
    """Cosines, [T, 1, rotated dimensions]."""
    sin: Tensor
    """Sines, [T, 1, rotated dimensions]. Negative where the other half is subtracted."""
    interleaved: bool

    kernels: Kernels

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates heads x [T, num_heads, head_size] in place, and returns them. Dimensions beyond
        the rotated ones are unchanged."""
        return self.kernels.rotate(x, self.cos, self.sin, self.interleaved)
