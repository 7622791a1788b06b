"""Measures the cost of the order of torch's attention kernels when every length is new: cuDNN
makes a plan for each.

usage: python -m gpu_kit.sdpa_order [--quick]

The kit runs it twice, with TORCH_CUDNN_SDPA_DEPRIORITIZED 0 and 1: whether it pays to leave cuDNN
out, as the backend `sdpa` does.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from gpu_kit.report import checking, die_with_the_kit
from gpu_kit.shape_8b import FULL, QUICK, ShapePlan

LENGTHS = 6


def measure(plan: ShapePlan, found: dict[str, Any]) -> None:
    """Milliseconds of causal attention of one prompt: of lengths that are new, and again."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    synchronize = torch.cuda.synchronize if plan.device == "cuda" else lambda: None
    new = []
    again = []
    for length in range(plan.length, plan.length - LENGTHS, -1):
        shape = (1, plan.heads, length, plan.head_size)
        q = torch.randn(shape, device=plan.device).to(getattr(torch, plan.dtype))
        for times in (new, again):
            synchronize()
            begun = time.perf_counter()
            scaled_dot_product_attention(q, q, q, is_causal=True)
            synchronize()
            times.append(1000 * (time.perf_counter() - begun))
    # The first length also loads the kernels.
    found.update(
        new_length_ms=round(statistics.median(new[1:]), 3),
        again_ms=round(statistics.median(again[1:]), 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    die_with_the_kit()
    with checking("attention of new lengths") as found:
        measure(QUICK if args.quick else FULL, found)


if __name__ == "__main__":
    main()
