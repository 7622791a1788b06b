"""Blocks of quantized weights, written: the reverse of `toolkit_lm_gguf.blocks`."""

from __future__ import annotations

import torch
from toolkit_lm.errors import CheckpointError
from torch import Tensor

_GROUP = 32


def q8_0(weight: Tensor) -> Tensor:
    """[N, K] float32 -> [N, blocks of a row, 34] uint8, bit for bit as ggml quantizes. Raises
    CheckpointError for values that are too large for a scale in float16."""
    groups = weight.view(len(weight), -1, _GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 127
    steps = groups * torch.where(scales == 0, 0, 1 / scales)
    # Half of a step is rounded away from zero.
    whole = steps.abs().floor()
    codes = (whole + ((steps.abs() - whole) * 2).floor()).copysign(steps)
    return _blocks(scales, codes.to(torch.int8).view(torch.uint8))


def q4_0(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [N, K] of -8 to 7, scales [N, K / 32] -> [N, blocks of a row, 18] uint8.

    A byte holds an input of the first half of a group in its low bits, and one of the second half.
    """
    raised = (codes + 8).to(torch.uint8).view(len(codes), -1, 2, _GROUP // 2)
    first, second = raised.unbind(2)
    return _blocks(scales.unsqueeze(-1), first | second << 4)


def _blocks(scales: Tensor, codes: Tensor) -> Tensor:
    """Scales [N, blocks, 1] in float16, then the codes [N, blocks, bytes]."""
    halves = scales.half()
    if not torch.isfinite(halves).all():
        raise CheckpointError("holds values that are too large for scales in float16")
    return torch.cat((halves.view(torch.uint8), codes), -1)
