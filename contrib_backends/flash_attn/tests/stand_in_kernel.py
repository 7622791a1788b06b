"""A stand-in for FlashAttention that runs on a CPU: the same arguments, read as its documentation
says, and plain torch."""

from __future__ import annotations

import torch
from toolkit_lm_flash_attn.arguments import Arguments
from toolkit_lm_flash_attn.backend import FlashAttnBackend, lacks
from toolkit_lm_flash_attn.kernel import Kernel
from torch import Tensor


def visible(given: Arguments, n: int) -> Tensor:
    """[queries, keys] bool: which keys the queries of sequence n see. The mask is aligned at its
    bottom right corner."""
    queries, keys = (
        int(starts[n + 1] - starts[n]) for starts in (given.query_start, given.key_start)
    )
    ahead = torch.arange(keys)[None] - (torch.arange(queries) + keys - queries)[:, None]
    before, after = given.window
    seen = ahead <= 0 if given.causal else torch.ones(queries, keys, dtype=torch.bool)
    if before >= 0:
        seen &= ahead >= -before
    if after >= 0:
        seen &= ahead <= after
    return seen


def keys_of(x: Tensor, given: Arguments, n: int) -> Tensor:
    """[keys, kv_heads, size] of sequence n."""
    first = int(given.key_start[n])
    last = int(given.key_start[n + 1])
    if given.block_table is None:
        return x[first:last]
    positions = torch.arange(last - first)
    return x[given.block_table[n][positions // x.shape[1]].long(), positions % x.shape[1]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, given: Arguments, scale: float, soft_cap: float | None
) -> Tensor:
    out = torch.zeros_like(q)
    for n in range(len(given.query_start) - 1):
        tokens = slice(int(given.query_start[n]), int(given.query_start[n + 1]))
        seen = visible(given, n)
        group = q.shape[1] // k.shape[-2]
        keys, values = (keys_of(x, given, n).float().repeat_interleave(group, 1) for x in (k, v))
        values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)
        scores = torch.einsum("qhd,khd->hqk", q[tokens].float(), keys) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0)
        out[tokens] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


GATHERING = Kernel(
    "stand-in", attend, soft_caps=True, page_step=None, dtypes=("float32", "bfloat16", "float16")
)
PAGING = GATHERING._replace(page_step=16)


def backend_of(kernel: Kernel) -> type[FlashAttnBackend]:
    """The backend as it would be with that kernel, on a CPU."""

    class StandIn(FlashAttnBackend):
        @classmethod
        def refuses(cls, spec):
            return "the stand-in is for a CPU" if spec.device != "cpu" else lacks(kernel, spec)

        @classmethod
        def find_kernel(cls):
            return kernel

    return StandIn
