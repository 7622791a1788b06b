"""KVCache: the memory of the KV cache on the device, and its blocks as bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.kv.spec import PageTensor
from toolkit_lm.kv.tier import Data
from toolkit_lm.messages import BlockCopy

_CHECKSUM = 4
"""Size of the checksum in bytes."""


class KVCache:
    """The KV cache's memory on the device. A pool is one byte buffer [pages of a block, num_blocks,
    page_bytes]: a page has its blocks side by side, and a block is copied in one call. Groups see
    pages as tensors of their own dtype and shape."""

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        self._pools = [
            zeros((pool.num_pages, pool.num_blocks, pool.page_bytes), device)
            for pool in config.pools
        ]
        self._pages = [self._pools[group.pool][: len(group.layers)] for group in config.groups]
        """Each KV group's pages: [layers, num_blocks, page_bytes]."""
        self._memory = [pages.numpy() if device.type == "cpu" else None for pages in self._pages]

    def tensors(self, index: int, layout: Sequence[PageTensor]) -> list[tuple[Tensor, ...]]:
        """Tensors of a KV group's layers, as its backend lays them into a page. Raises ValueError
        if they do not fill it."""
        group = self.config.groups[index]
        if sum(map(_num_bytes, layout)) != group.spec.page_bytes:
            raise ValueError(
                f"backend {group.backend!r} lays {', '.join(map(str, layout))} into a page of "
                f"layer {group.layers[0]!r}: "
                f"{sum(map(_num_bytes, layout))} bytes. The layer's spec has pages of "
                f"{group.spec.page_bytes} bytes."
            )
        return [_split(pages, layout) for pages in self._pages[index]]

    def block(self, group: int, block: int) -> Block:
        """Returns a block of a KV group, as bytes."""
        return Block(self._pages[group], self._memory[group], block)

    def copy(self, copy: BlockCopy) -> None:
        """Copies a block on the device."""
        pages = self._pages[copy.group]
        pages[:, copy.target] = pages[:, copy.source]


class Block:
    """The bytes of a block: one page per layer of its group, [layers, page_bytes]. A stage of a
    pipeline may have no layer of the group."""

    def __init__(self, pages: Tensor, memory: Any | None, block: int) -> None:
        """`pages`: those of all blocks, [layers, num_blocks, page_bytes]; on a CPU, `memory` is
        the same as a NumPy array."""
        self._all = pages
        self._memory = memory
        self._block = block

    @property
    def _pages(self) -> Tensor:
        return self._all[:, self._block]

    @property
    def num_bytes(self) -> int:
        return self._all.shape[0] * self._all.shape[2]

    @property
    def memory(self) -> Sequence[Data]:
        """The pages themselves, to be written to; empty on a device other than the CPU."""
        return [] if self._memory is None else [*self._memory[:, self._block]]

    def read_into(self, target: Data) -> None:
        """Copies the block into host memory of `num_bytes` bytes."""
        if self.num_bytes:
            place = torch.frombuffer(target, dtype=torch.uint8)
            place.view(self._pages.shape).copy_(self._pages)

    def to_bytes(self) -> bytes:
        """Returns a copy of the block, followed by its CRC-32, little-endian."""
        data = bytearray(self.num_bytes + _CHECKSUM)
        view = memoryview(data)
        self.read_into(view[:-_CHECKSUM])
        view[-_CHECKSUM:] = crc32(view[:-_CHECKSUM]).to_bytes(_CHECKSUM, "little")
        return bytes(data)

    def write(self, source: Data, *, checked: bool) -> None:
        """Copies bytes from the host into the block. `checked`: the bytes come from `to_bytes`.
        Raises ValueError, without writing, if the checksum or the size does not match."""
        data = memoryview(source).cast("B")
        wanted = self.num_bytes + (_CHECKSUM if checked else 0)
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes came of a block of {wanted}")
        data = data[: self.num_bytes]
        if checked and crc32(data) != int.from_bytes(memoryview(source)[-_CHECKSUM:], "little"):
            raise ValueError("the checksum of a block is wrong")
        if self.num_bytes:
            # torch warns of memory that may not be written.
            place = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
            self._pages.copy_(place.view(self._pages.shape))


def _dtype(tensor: PageTensor) -> torch.dtype:
    dtype = getattr(torch, tensor.dtype, None)
    assert isinstance(dtype, torch.dtype), f"{tensor.dtype!r} is no dtype"
    return dtype


def _num_bytes(tensor: PageTensor) -> int:
    return math.prod(tensor.shape) * _dtype(tensor).itemsize


def _split(pages: Tensor, layout: Sequence[PageTensor]) -> tuple[Tensor, ...]:
    tensors = []
    start = 0
    for tensor in layout:
        end = start + _num_bytes(tensor)
        tensors.append(pages[:, start:end].view(_dtype(tensor)).view(len(pages), *tensor.shape))
        start = end
    return tuple(tensors)


def zeros(shape: tuple[int, ...], device: torch.device, *, pinned: bool = False) -> Tensor:
    """Makes a zeroed byte tensor. `pinned`: host memory that a GPU accesses directly."""
    if device.type != "cpu" or pinned or 0 in shape:
        return torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
    # torch.zeros writes the memory, which takes seconds for gigabytes. These pages are allocated on
    # first use.
    return torch.from_numpy(np.zeros(shape, np.uint8))
