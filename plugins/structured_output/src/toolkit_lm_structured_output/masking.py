"""Packed masks rule tokens out of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=-1, bitorder="little"),
    np.inf,
    -np.inf,
).astype(np.float32)
"""[256, 8]: by the byte of a mask, the most that the logits of its tokens may be."""


def apply_masks(logits: Tensor, masks: Sequence[np.ndarray | int]) -> None:
    """Changes logits [R, V] float32 in place: what a row's mask does not allow becomes minus
    infinity.

    A mask is [words] int32, as Matcher.fill makes it, of more or fewer tokens than V: those that it
    has no bit for are not allowed. Or it is the only token that is.
    """
    (_apply_on_host if logits.device.type == "cpu" else _apply_on_device)(logits, masks)


def _apply_on_device(logits: Tensor, masks: Sequence[np.ndarray | int]) -> None:
    """Masks cross packed, and are unpacked there."""
    packed = torch.from_numpy(_packed(masks, logits.shape[-1])).to(logits.device, non_blocking=True)
    bits = packed[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[-1]] == 0, -torch.inf)


def _apply_on_host(logits: Tensor, masks: Sequence[np.ndarray | int]) -> None:
    """Row by row, so that the limits stay in the cache. What a mask allows makes no difference to
    what it costs."""
    size = logits.shape[-1]
    limits = np.empty((-(-size // 8), 8), np.float32)
    for row, mask in zip(logits.numpy(), masks, strict=True):
        if isinstance(mask, np.ndarray):
            known = mask.view(np.uint8)[: len(limits)]
            np.take(_LIMITS, known, axis=0, out=limits[: len(known)], mode="clip")
            limits[len(known) :] = -np.inf
            np.minimum(row, limits.reshape(-1)[:size], out=row)
        else:
            kept = row[mask]
            row[:] = -np.inf
            row[mask] = kept


def _packed(masks: Sequence[np.ndarray | int], size: int) -> np.ndarray:
    """[R, words] int32, of `size` tokens."""
    packed = np.zeros((len(masks), -(-size // 32)), np.uint32)
    for row, mask in zip(packed, masks, strict=True):
        if isinstance(mask, np.ndarray):
            known = mask.view(np.uint32)[: len(row)]
            row[: len(known)] = known
        else:
            row[mask // 32] = 1 << mask % 32
    return packed.view(np.int32)
