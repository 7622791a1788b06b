"""Arena: memory for weights in huge pages, so that reads seldom miss the TLB."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch
from torch import Tensor

_CHUNK = 64 << 20
_ALIGNMENT = 64


class Arena:
    """Allocator that hands out memory piece by piece. A chunk is freed when its last tensor is
    gone."""

    def __init__(self, chunk: int = _CHUNK) -> None:
        """`chunk`: bytes of a chunk."""
        self._chunk_size = chunk
        self._chunk: mmap.mmap | None = None
        self._used = 0
        self.size = 0
        """Bytes handed out so far."""

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor [count]."""
        size = count * dtype.itemsize
        self.size += size
        if self._chunk is None or self._used + size > len(self._chunk):
            self._chunk = mmap.mmap(
                -1, max(size, self._chunk_size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            # A kernel that was built without huge pages refuses the advice.
            with suppress(OSError):
                self._chunk.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        tensor = torch.frombuffer(self._chunk, dtype=dtype, count=count, offset=self._used)
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return tensor
