"""KVCache: the memory of the KV cache, on the device and on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from toolkit_lm.kv.layout import KVCacheConfig
from toolkit_lm.kv.spec import PageTensor
from toolkit_lm.messages import BlockCopy, StepPlan


class KVCache:
    """A pool's memory is a buffer of bytes [num_blocks, page_bytes] for each page of its blocks.
    Groups see it as tensors of their own."""

    def __init__(self, config: KVCacheConfig, device: torch.device) -> None:
        self.config = config
        host = torch.device("cpu")
        self._pages = [
            [_zeros((p.num_blocks, p.page_bytes), device, device) for _ in range(p.num_pages)]
            for p in config.pools
        ]
        self._host_pages = [
            [_zeros((p.num_host_blocks, p.page_bytes), host, device) for _ in range(p.num_pages)]
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

    def copy(self, plan: StepPlan) -> None:
        """Does the copies of a plan: to the host, from the host, then on the device."""
        for copies, source, target in (
            (plan.swap_out, self._pages, self._host_pages),
            (plan.swap_in, self._host_pages, self._pages),
            (plan.copies, self._pages, self._pages),
        ):
            for copy in copies:
                self._copy_block(copy, source, target)

    def _copy_block(
        self, copy: BlockCopy, source: list[list[Tensor]], target: list[list[Tensor]]
    ) -> None:
        group = self.config.groups[copy.group]
        for index in range(len(group.layers)):
            target[group.pool][index][copy.target].copy_(source[group.pool][index][copy.source])


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


def _zeros(shape: tuple[int, int], device: torch.device, model_device: torch.device) -> Tensor:
    if device.type != "cpu" or model_device.type == "cuda" or 0 in shape:
        return torch.zeros(
            shape,
            dtype=torch.uint8,
            device=device,
            pin_memory=device.type == "cpu" and model_device.type == "cuda",
        )
    # torch writes zeros, which takes seconds for gigabytes; these pages come when they are first
    # used.
    return torch.from_numpy(np.zeros(shape, np.uint8))
