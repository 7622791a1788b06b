"""torch's own attention kernels, but for the one that is slow at shapes that it has not met."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def fused_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """Attention as `queries` [..., Tq, head_size], over keys and values [..., Tk, head_size], by
    torch's scaled_dot_product_attention.

    `mask` is [..., Tq, Tk]: of bool, where True is seen; or a bias, which kernels for GPUs take in
    the queries' dtype alone.
    """
    if mask is not None and mask.is_floating_point() and queries.device.type != "cpu":
        mask = mask.to(queries.dtype)
    with _without_cudnn(queries.device):
        return scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=causal, scale=scale
        )


@contextmanager
def _without_cudnn(device: torch.device) -> Iterator[None]:
    """On Hopper torch asks cuDNN first. It builds a plan for each pair of lengths, while a request
    waits, and keeps all of them."""
    backends: Any = torch.backends.cuda
    is_on = device.type == "cuda" and backends.cudnn_sdp_enabled()
    if is_on:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if is_on:
            torch.backends.cuda.enable_cudnn_sdp(True)
