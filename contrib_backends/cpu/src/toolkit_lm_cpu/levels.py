"""Levels: groups of codes of 4 bits as codes of 8 bits, with one scale per output."""

from __future__ import annotations

from typing import NamedTuple

import torch
from toolkit_lm.model import QuantizedWeight
from torch import Tensor
from torch.nn import functional as F

PART = 32
"""Codes that have levels in common are a multiple of this number."""
_ADDED = 1 / 4
"""Most error of codes of 8 bits, of that of the codes of 4 bits which they stand for."""


class Levels(NamedTuple):
    """Codes of 4 bits in groups as codes of 8 bits, with one scale per output.

    A code q of a group is ((levels[q] - zero) * ratio + 2**14) >> 15, times the output's scale.
    """

    scales: Tensor
    """[N, 1] float32."""
    ratios: Tensor
    """[N, G] int8: a group's scale, divided by the greatest of its output, times 127."""
    levels: Tensor
    """[16] int16."""
    zeros: Tensor | None
    """[N, G] int16, or None: all are 0."""


def may_have_levels(weight: QuantizedWeight) -> bool:
    """Whether a weight has levels, if its scales allow it."""
    inputs = weight.codes.shape[1]
    groups = weight.scales.shape[1]
    shifted = weight.zeros is not None or weight.mins is not None
    return (
        weight.bits <= 4
        and groups > 1
        and inputs % groups == 0
        and inputs // groups % PART == 0
        and not (shifted and weight.values is not None)
    )


def levels_of(weight: QuantizedWeight) -> Levels | None:
    """The levels of a weight in codes of up to 4 bits, in groups of a multiple of 32.

    None: it has no such groups, or its scales differ too much, so that 8 bits of an output's scale
    would add more than a quarter of the error that codes of 4 bits have.
    """
    if not may_have_levels(weight) or not weight.scales.isfinite().all():
        return None
    scales = weight.scales.float()
    offsets = offsets_of(weight)
    first = -(2 ** (weight.bits - 1))
    values = torch.arange(-8, 8).float()
    used = values[8 + first : 8 - first]
    if weight.values is not None:
        used = weight.values.float()
        values = F.pad(used, (0, 16 - len(used)))
    zeros = None
    most = used.abs().amax()
    if offsets is not None:
        zeros = offsets / scales
        if not zeros.isfinite().all():
            return None
        most = torch.maximum(most, torch.maximum(zeros - used[0], used[-1] - zeros).amax())
    greatest = scales.abs().amax(1, keepdim=True)
    scale = greatest * most / 127
    own = scales * (used.amax() - used.amin()) / (len(used) - 1)
    if own.shape[1] * scale.square().sum() > _ADDED**2 * own.square().sum():
        return None
    ratios = (scales * (127 / greatest.clamp(min=1e-30))).round().to(torch.int8)
    whole = (2**15 - 1) / most.clamp(min=1e-30)
    return Levels(
        scale,
        ratios,
        (values * whole).round().clamp(-(2**15), 2**15 - 1).to(torch.int16),
        None if zeros is None else (zeros * whole).round().to(torch.int16),
    )


def offsets_of(weight: QuantizedWeight) -> Tensor | None:
    """Offset of each group, with the kernels' zeros of codes: [N, G]. It is subtracted."""
    offsets = weight.mins
    if weight.zeros is not None:
        zero = 0 if weight.values is not None else 2 ** (weight.bits - 1)
        shifted = (weight.zeros - zero) * weight.scales
        offsets = shifted if offsets is None else offsets + shifted
    return offsets if offsets is not None and offsets.any() else None
