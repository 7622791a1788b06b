"""Arena: memory for weights in huge pages, so that reading them seldom waits for an address."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_CHUNK = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Gives out memory, piece by piece. It goes back to the system when no tensor of a chunk is
    left."""

    def __init__(self) -> None:
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self.size = 0
        """Bytes that were given out."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor [count]."""
        size = count * dtype.itemsize
        self.size += size
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk = mmap.mmap(
                -1, max(size, _CHUNK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            self._chunk.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor
