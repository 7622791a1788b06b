"""Memory: buffers at fixed addresses, which the graphs of a model share. Only one of them runs at a
time."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """Tensors that look like others, in buffers that are used again once they are given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0
        """Of all buffers."""
        self._free: list[Tensor] = []
        self._taken: dict[int, Tensor] = {}
        """By address."""

    def like(self, tensor: Tensor) -> Tensor:
        """One of its dtype, shape and strides. What it holds is arbitrary."""
        return self.take(list(tensor.shape), list(tensor.stride()), tensor.dtype)

    def take(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        """Of a buffer that is free and large enough, the smallest; else of a new one."""
        extent = (
            1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            if all(shape)
            else 1
        )
        num_bytes = -(-extent * dtype.itemsize // 16) * 16
        able = [index for index, buffer in enumerate(self._free) if len(buffer) >= num_bytes]
        if able:
            buffer = self._free.pop(min(able, key=lambda index: len(self._free[index])))
        else:
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
            self.num_bytes += num_bytes
        self._taken[buffer.data_ptr()] = buffer
        return buffer.view(dtype).as_strided(shape, strides)

    def give_back(self, tensor: Tensor) -> None:
        """What `take` gave. Others are left alone."""
        buffer = self._taken.pop(tensor.data_ptr(), None)
        if buffer is not None:
            self._free.append(buffer)

    def give_all_back(self) -> None:
        """The next graph may use all of it."""
        self._free += self._taken.values()
        self._taken.clear()
