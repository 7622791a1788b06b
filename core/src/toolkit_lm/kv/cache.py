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
"""Bytes."""


class KVCache:
    """A pool's memory is a buffer of bytes [num_blocks, page_bytes] for each page of its blocks.
    Groups see it as tensors of their own."""

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        self._pages = [
            [zeros((p.num_blocks, p.page_bytes), device) for _ in range(p.num_pages)]
            for p in config.pools
        ]

    def tensors(self, index: int, layout: Sequence[PageTensor]) -> list[tuple[Tensor, ...]]:
        """Per layer of a KV group, the tensors that its backend lays into a page. Raises ValueError
        where they do not fill it."""
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
        """A block of a KV group, as bytes."""
        pages = self._pages[self.config.groups[group].pool]
        return Block([page[block] for page in pages[: len(self.config.groups[group].layers)]])

    def copy(self, copy: BlockCopy) -> None:
        """Copies a block on the device."""
        group = self.config.groups[copy.group]
        for pages in self._pages[group.pool][: len(group.layers)]:
            pages[copy.target].copy_(pages[copy.source])


class Block:
    """The bytes of a block, which is a page [page_bytes] for each layer of its group."""

    def __init__(self, pages: list[Tensor]) -> None:
        self._pages = pages

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self._pages))

    def read_into(self, target: Data) -> None:
        """Copies it into host memory of `num_bytes` bytes."""
        place = torch.frombuffer(target, dtype=torch.uint8)
        start = 0
        for page in self._pages:
            place[start : start + len(page)].copy_(page)
            start += len(page)

    def to_bytes(self) -> bytes:
        """A copy, with its CRC-32 after it, little-endian."""
        data = bytearray(self.num_bytes + _CHECKSUM)
        view = memoryview(data)
        self.read_into(view[:-_CHECKSUM])
        view[-_CHECKSUM:] = crc32(view[:-_CHECKSUM]).to_bytes(_CHECKSUM, "little")
        return bytes(data)

    def write(self, source: Data, *, checked: bool) -> None:
        """Copies bytes from the host into it. `checked`: they are those of `to_bytes`. Raises
        ValueError, and writes nothing, where they are not its own."""
        data = memoryview(source).cast("B")
        wanted = self.num_bytes + (_CHECKSUM if checked else 0)
        if len(data) != wanted:
            raise ValueError(f"{len(data)} bytes came of a block of {wanted}")
        data = data[: self.num_bytes]
        if checked and crc32(data) != int.from_bytes(memoryview(source)[-_CHECKSUM:], "little"):
            raise ValueError("the checksum of a block is wrong")
        with warnings.catch_warnings():
            # It is only read.
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
    for one in layout:
        end = start + _num_bytes(one)
        tensors.append(pages[:, start:end].view(_dtype(one)).view(len(pages), *one.shape))
        start = end
    return tuple(tensors)


def zeros(shape: tuple[int, int], device: torch.device, *, pinned: bool = False) -> Tensor:
    """Bytes. `pinned`: host memory that a GPU reads and writes by itself."""
    if device.type != "cpu" or pinned or 0 in shape:
        return torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
    # torch writes zeros, which takes seconds for gigabytes; these pages come when they are first
    # used.
    return torch.from_numpy(np.zeros(shape, np.uint8))
