"""The device that a thread works on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Context in which a GPU, given by its index, is the thread's current one.

    Some kernels are launched on the current GPU, wherever their tensors are, and some queries refer
    to it. On exit the host program's choice is restored. The context can be entered again, but not
    nested.
    """
    if device.type != "cuda" or device.index is None:
        return nullcontext()
    current: AbstractContextManager[object] = torch.cuda.device(device)
    return current
