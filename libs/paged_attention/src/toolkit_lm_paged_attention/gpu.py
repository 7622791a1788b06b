"""Whether kernels can run on the GPU that is here."""

from __future__ import annotations

import torch


def gpu_refusal(kernels: str, oldest: tuple[int, int]) -> str | None:
    """Why `kernels`, by that name, cannot run on the GPU; None: they can. `oldest`: compute
    capability of the oldest GPUs that run them."""
    if not torch.cuda.is_available():
        return "no GPU is there"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < oldest:
        return (
            f"the GPU has compute capability {major}.{minor}, and {kernels} needs "
            f"{oldest[0]}.{oldest[1]}"
        )
    return None
