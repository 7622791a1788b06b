"""Between the host and the device: to the device without a wait, and back with a single one."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """On a CPU, the same memory. Otherwise a copy: the array may be written to afterwards."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def to_host(*tensors: Tensor) -> list[Tensor]:
    """The same on the host, by one copy for all: each copy waits for the device.

    They are of floats of up to 64 bits, of bool, or of integers of up to 2^53.
    """
    if tensors[0].device.type == "cpu":
        return list(tensors)
    packed = torch.cat([tensor.double().flatten() for tensor in tensors]).cpu()
    parts = torch.split(packed, [tensor.numel() for tensor in tensors])
    return [
        part.to(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
