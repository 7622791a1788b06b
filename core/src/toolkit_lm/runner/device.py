"""The device that a thread works on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside, a GPU that is named by its number is the thread's current one.

    Some kernels are launched on the current GPU, wherever their tensors are, and some questions are
    asked of it. The host program's choice is back afterwards. It can be entered again, but not
    within itself.
    """
    if device.type != "cuda" or device.index is None:
        return nullcontext()
    current: AbstractContextManager[object] = torch.cuda.device(device)
    return current
