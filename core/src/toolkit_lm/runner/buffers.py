"""StepBuffers: the inputs of a step at fixed addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.attention import BatchLimits


class Buffer:
    """One input: an array on the host, and a tensor on the device. On a CPU they are the same memory."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
        self._mirror = torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")
        self.host: np.ndarray = self._mirror.numpy()
        self._tensor = self._mirror if device.type == "cpu" else torch.zeros(*shape, dtype=dtype, device=device)

    def upload(self, *size: int) -> Tensor:
        """What the host holds of it, up to `size` along the first axes, as a view on the device."""
        part = tuple(map(slice, size))
        tensor = self._tensor[part]
        if self._tensor is not self._mirror:
            tensor.copy_(self._mirror[part], non_blocking=True)
        return tensor


class GroupBuffers:
    """The inputs of one KV group; of what caches nothing, there are only lengths."""

    def __init__(self, limits: BatchLimits, table_width: int, device: torch.device) -> None:
        self.seq_lens = Buffer((limits.num_rows,), torch.int32, device)
        self.slots = Buffer((limits.num_tokens,), torch.int64, device)
        self.table = Buffer((limits.num_rows, table_width), torch.int32, device)


class StepBuffers:
    """Made once, for the largest step; each step uses the beginning of them. That is what a captured graph can read."""

    def __init__(self, limits: BatchLimits, table_widths: Sequence[int], device: torch.device) -> None:
        """`table_widths`: most entries of a block table, per KV group."""
        self.input_ids = Buffer((limits.num_tokens,), torch.int64, device)
        self.positions = Buffer((limits.num_tokens,), torch.int64, device)
        self.query_start = Buffer((limits.num_rows + 1,), torch.int32, device)
        self.groups = [GroupBuffers(limits, width, device) for width in table_widths]
