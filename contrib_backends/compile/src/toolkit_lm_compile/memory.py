"""Memory of CUDA graphs: buffers at fixed addresses that a model's graphs share. Only one graph
runs at a time."""

from __future__ import annotations

import torch
from torch import Tensor


class Memory:
    """A pool of buffers for tensors of any shape. Buffers are reused once they are given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_bytes = 0
        """Bytes of all buffers."""
        self._free: list[Tensor] = []
        self._allocated: dict[int, Tensor] = {}
        """Buffers in use, by address."""

    def like(self, tensor: Tensor) -> Tensor:
        """Takes a tensor of the same dtype, shape and strides, with arbitrary contents."""
        return self.allocate(list(tensor.shape), list(tensor.stride()), tensor.dtype)

    def allocate(self, shape: list[int], strides: list[int], dtype: torch.dtype) -> Tensor:
        """Takes a tensor from the smallest free buffer that is large enough, else from a new
        one."""
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
        self._allocated[buffer.data_ptr()] = buffer
        return buffer.view(dtype).as_strided(shape, strides)

    def give_back(self, tensor: Tensor) -> None:
        """Frees the buffer of a tensor that `take` returned. Other tensors are ignored."""
        buffer = self._allocated.pop(tensor.data_ptr(), None)
        if buffer is not None:
            self._free.append(buffer)

    def give_all_back(self) -> None:
        """Frees all buffers, so that the next graph can use them."""
        self._free += self._allocated.values()
        self._allocated.clear()
