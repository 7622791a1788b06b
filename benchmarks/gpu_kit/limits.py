"""The card's limits: bytes a second of a copy, and FLOP a second of a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpu_kit.report import checking
from gpu_kit.shape_8b import ShapePlan

COPY = "GPU_KIT_COPY"
PRODUCT = "GPU_KIT_PRODUCT"
"""Environment variables that later processes know the two by."""
CHECKS = {"copy bandwidth": COPY, "matrix rate": PRODUCT}
RATE = "per_second"


def best(work: Callable[[], object], synchronize: Callable[[], object], tries: int = 8) -> float:
    """Seconds of the fastest."""
    times = []
    for _ in range(tries):
        synchronize()
        begun = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def measure_limits(plan: ShapePlan) -> None:
    """Bytes a second, read and written, of a copy; FLOP a second of a matrix product."""
    import torch

    synchronize = torch.cuda.synchronize if plan.device == "cuda" else lambda: None
    with checking("copy bandwidth") as found:
        source = torch.ones(plan.copy_bytes, dtype=torch.uint8, device=plan.device)
        target = torch.empty_like(source)
        found[RATE] = 2 * plan.copy_bytes / best(lambda: target.copy_(source), synchronize)
    with checking("matrix rate") as found:
        shape = (plan.side, plan.side)
        dtype = getattr(torch, plan.dtype)
        a = torch.randn(shape, device=plan.device).to(dtype)
        b = torch.randn(shape, device=plan.device).to(dtype)
        found[RATE] = 2 * plan.side**3 / best(lambda: a @ b, synchronize)
