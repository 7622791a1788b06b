"""The attention formula, step by step: for what torch's kernels cannot do, and for decode rows,
where it is faster."""

from __future__ import annotations

import torch
from torch import Tensor


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Unscaled scores [B, M, L] in fp32 of q [B, M, D] and k [B, L, D]."""
    k = k.transpose(1, 2)
    if q.dtype is torch.bfloat16 and q.device.type == "cpu":
        # The product is rounded to bf16 on the way out; a second product, less the first, gives
        # what the rounding took away. Both together are faster than one of copies in fp32.
        high = torch.bmm(q, k)
        low = torch.baddbmm(high, q, k, beta=-1)
        return high.float().add_(low)
    return torch.bmm(q.float(), k.float())


def probabilities(
    scores: Tensor,
    scale: float,
    soft_cap: float | None,
    bias: Tensor | None,
    mask: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:
    """Softmax over the last axis of fp32 scores, which are overwritten.

    `bias` and `mask` (0 or -inf) are added; `sinks` (last axis 1) joins the denominator. All three
    broadcast to the scores. Each query needs a visible key.
    """
    scores.mul_(scale)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if bias is not None:
        scores.add_(bias)
    if mask is not None:
        scores.add_(mask)
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.float()
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    scores.sub_(top).exp_()
    return scores.div_(scores.sum(-1, keepdim=True).add_((sinks - top).exp_()))
