"""The masks of xFormers, which is imported only here and in kernel.py, when a step first needs
it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def block_diagonal(
    queries: Sequence[int],
    keys: Sequence[int],
    device: torch.device,
    *,
    causal: bool,
    window: int | None,
) -> Any:
    """The mask of sequences with so many queries and keys; causal, where the last query of each is
    at the last of its keys."""
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    mask = BlockDiagonalMask.from_seqlens(queries, keys, device=device)
    if not causal:
        return mask
    if list(queries) == list(keys):
        return mask.make_causal() if window is None else mask.make_local_attention(window)
    return (
        mask.make_causal_from_bottomright()
        if window is None
        else mask.make_local_attention_from_bottomright(window)
    )


def paged_block_diagonal(
    queries: Sequence[int], keys: Sequence[int], pages: Tensor, page_size: int, *, causal: bool
) -> Any:
    """Makes a mask like `block_diagonal` whose keys are read through `pages` [sequences, most
    pages] int32."""
    from xformers.ops.fmha import attn_bias

    name = (
        "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask"
        if causal
        else "PagedBlockDiagonalPaddedKeysMask"
    )
    return getattr(attn_bias, name).from_seqlens(
        queries, keys, pages, page_size, device=pages.device
    )
