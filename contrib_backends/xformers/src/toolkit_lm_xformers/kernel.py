"""Whether the kernels of xFormers can run here, and how they are called."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from toolkit_lm_paged_attention import gpu_refusal
from torch import Tensor

_OLDEST = (8, 0)
"""Compute capability of the oldest GPUs that have the kernels: Ampere."""
_PAGE = 256
"""The kernels read pages of this many tokens, and of multiples."""


def missing() -> str | None:
    """That the package is not installed; None when it is."""
    return (
        "the package xformers is not installed"
        if importlib.util.find_spec("xformers") is None
        else None
    )


def refusal() -> str | None:
    """Why the installed kernels cannot run on the GPU; None when they can."""
    if (reason := gpu_refusal("xFormers", _OLDEST)) is not None:
        return reason
    if not _flash().is_available():
        return "xFormers has no kernel for this PyTorch: see python -m xformers.info"
    return None


@functools.cache
def reads_pages(block_size: int | None) -> bool:
    """Whether the kernels read blocks of that size out of the cache themselves."""
    if block_size is None or block_size % _PAGE:
        return False
    from xformers.ops.fmha.attn_bias import PagedBlockDiagonalPaddedKeysMask

    # Those of PyTorch itself, which xFormers falls back on, do not.
    return PagedBlockDiagonalPaddedKeysMask in _flash().SUPPORTED_ATTN_BIAS_TYPES


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """Attention in the shape of q [1, Q, kv_heads, group, size]. k and v are [1, K, kv_heads,
    group, size], or pages one after the other."""
    from xformers.ops import fmha

    found: Tensor = fmha.memory_efficient_attention_forward(q, k, v, attn_bias=mask, scale=scale)
    return found


def _flash() -> Any:
    from xformers.ops.fmha import flash

    return flash.FwOp
