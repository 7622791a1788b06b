"""Tables of biases that depend on the offset of a key from its query."""

from __future__ import annotations

import torch
from toolkit_lm.attention import OffsetBias
from torch import Tensor


class OffsetTables:
    """The biases of a backend's layers by offset, as tables that grow with the sequences."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[int, Tensor] = {}
        """Tables by the identity of the bias. Layers hold the biases for as long as the backend
        lives."""

    def find(self, bias: OffsetBias, most: int) -> Tensor:
        """Biases [num_heads, offsets] float32 of keys at a distance of up to `most` or more. Offset
        0 is in the middle."""
        table = self._tables.get(id(bias))
        if table is None or table.shape[1] <= 2 * most:
            # It grows by doubling, so that most steps find one.
            table = bias.by_offset(1 << most.bit_length()).float().contiguous().to(self._device)
            self._tables[id(bias)] = table
        return table
