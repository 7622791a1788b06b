"""Weights that the kernels hold only after they are rounded again: which, and how."""

from __future__ import annotations

import torch
from toolkit_lm.model import QuantizedWeight

from toolkit_lm_cpu.library import exported
from toolkit_lm_cpu.panels import LANES

_SOME = 2**22
"""Weights that are rounded again at a time."""
FLOAT8 = {torch.float8_e4m3fn: exported("E4M3"), torch.float8_e5m2: exported("E5M2")}
"""The kernels' number of the dtypes of float8 that they decode."""


def rounding(weight: QuantizedWeight) -> str | None:
    """Why the kernels must round a weight again. None: they hold it as it is."""
    inputs = weight.codes.shape[1]
    groups = weight.scales.shape[1]
    if weight.codes.is_floating_point():
        is_scaled = weight.zeros is weight.mins is weight.values is None
        if weight.codes.dtype not in FLOAT8 or not is_scaled:
            return f"they have no codes in {weight.codes.dtype}"
        if weight.groups is not None:
            return "groups of inputs in float8 are not runs of equal length"
        groups_of = inputs / groups
        return None if groups_of % LANES == 0 else _not_a_multiple(groups_of)
    if weight.values is not None and weight.bits > 4:
        return "they have values of codes of 4 bits, and no more"
    if groups > 1 and (inputs % groups or inputs // groups % LANES):
        return _not_a_multiple(inputs / groups)
    if (
        weight.groups is not None
        and len(set(weight.groups.bincount(minlength=groups).tolist())) > 1
    ):
        return "groups of inputs are of unequal size"
    return None


def _not_a_multiple(inputs: float) -> str:
    return f"a group of {inputs:g} inputs is not a multiple of {LANES}"


def round_again(weight: QuantizedWeight) -> QuantizedWeight:
    """The nearest weight in codes of 8 bits, with a scale for 32 or 16 inputs; for all if neither
    divides them."""
    outputs, inputs = weight.codes.shape
    group = fine_group(weight)
    codes = torch.empty(outputs, inputs, dtype=torch.uint8)
    scales = torch.empty(outputs, inputs // group)
    # Some rows at a time: as floats they take four times the memory.
    number = max(1, _SOME // max(1, inputs))
    for first in range(0, outputs, number):
        some = torch.arange(first, min(first + number, outputs))
        parts = weight.select(some).dequantized().view(len(some), -1, group)
        step = parts.abs().amax(2) / 127
        scales[some] = step
        rounded = (parts / step.clamp(min=1e-30).unsqueeze(2)).round().add_(128)
        codes[some] = rounded.flatten(1).to(torch.uint8)
    return QuantizedWeight(codes=codes, bits=8, scales=scales)


def fine_group(weight: QuantizedWeight) -> int:
    """Inputs that share a scale where a weight is rounded again."""
    inputs = weight.codes.shape[1]
    return next((size for size in (32, LANES) if inputs % size == 0), inputs)
