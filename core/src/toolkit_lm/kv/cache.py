"""KVCache: the memory of the KV cache on the device, and its blocks as bytes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
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
    """The KV cache's memory on the device. A pool is one byte buffer [num_blocks, page_bytes] per
    page of its blocks. Groups see it as tensors of their own dtype and shape."""

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        self._pages = [
            [zeros((p.num_blocks, p.page_bytes), device) for _ in range(p.num_pages)]
            for p in config.pools
        ]

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
        return [_split(self._pages[group.pool][page], layout) for page in range(len(group.layers))]

    def block(self, group: int, block: int) -> Block:
        """Returns a block of a KV group, as bytes."""
        pages = self._pages[self.config.groups[group].pool]
        return Block([page[block] for page in pages[: len(self.config.groups[group].layers)]])

    def copy(self, copy: BlockCopy) -> None:
        """Copies a block on the device."""
        group = self.config.groups[copy.group]
        for pages in self._pages[group.pool][: len(group.layers)]:
            pages[copy.target].copy_(pages[copy.source])


class Block:
    """The bytes of a block: one page [page_bytes] per layer of its group."""

    def __init__(self, pages: list[Tensor]) -> None:
        self._pages = pages

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pages))

    def read_into(self, target: Data) -> None:
        """Copies the block into host memory of `num_bytes` bytes."""
        if not self._pages:
            # A pipeline stage without layers of the group.
            return
        place = torch.frombuffer(target, dtype=torch.uint8)
        start = 0
        for page in self._pages:
            place[start : start + len(page)].copy_(page)
            start += len(page)

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
        if not self._pages:
            return
        with warnings.catch_warnings():
            # The array is only read.
            warnings.simplefilter("ignore", UserWarning)
            place = torch.frombuffer(data, dtype=torch.uint8)
        start = 0
        for page in self._pages:
            page.copy_(place[start : start + len(page)])
            start += len(page)


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


def zeros(shape: tuple[int, int], device: torch.device, *, pinned: bool = False) -> Tensor:
    """Makes a zeroed byte tensor. `pinned`: host memory that a GPU accesses directly."""
    if device.type != "cpu" or pinned or 0 in shape:
        return torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
    # torch.zeros writes the memory, which takes seconds for gigabytes. These pages are allocated on
    # first use.
    return torch.from_numpy(np.zeros(shape, np.uint8))
