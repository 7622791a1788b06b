"""FlexAttention, by the formula or in one compiled kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from toolkit_lm_flex.plan import MaskMod

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(scaled score, piece, head, query, key) -> score."""

_WHOLE = 2**30
"""Size of a block that holds all queries, or all keys."""
_BLOCK = 128
"""Queries of a block in `create_block_mask`."""
_MOST_KERNELS = 512
"""torch compiles one for each kind of mask, of change to scores and of aux, and for each of three
sizes being 1 or not. Past its own limit, which is 8, it would compute without a kernel and write
all scores to memory; past this one it raises.
"""


def formula(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskMod, change: ScoreMod | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention as q, and the logarithm of the softmax's denominator [N, heads, Q] in fp32.

    q [N, heads, Q, size], k and v [N, kv_heads, K, size]. A query that sees no key gives 0, and
    -inf.
    """
    # This is the op that flex_attention calls. Called directly, the functions are not traced, and
    # traced again for each shape.
    whole = _one_block(mask, q.shape[2], k.shape[2], q.device)
    out, logsumexp, _ = torch.ops.higher_order.flex_attention(
        q, k, v, change or _unchanged, whole.as_tuple(), scale, {}
    )
    # It is to the base 2.
    return out, logsumexp * math.log(2)


def fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: BlockMask,
    change: ScoreMod | None,
    scale: float,
    *,
    logsumexp: bool,
) -> tuple[Tensor, Tensor | None]:
    """Same as `formula`, in one kernel, which torch compiles. The logarithm is None unless asked
    for."""
    arguments: dict[str, Any] = {
        "score_mod": change,
        "block_mask": blocks,
        "scale": scale,
        "enable_gqa": True,
        "kernel_options": {"FORCE_USE_FLEX_ATTENTION": not _decodes(q, k)},
    }
    with _many_kernels():
        if not logsumexp:
            return _compiled()(q, k, v, **arguments), None
        out, found = _compiled()(q, k, v, **arguments, return_aux=AuxRequest(lse=True))
        return out, found.lse


def _decodes(q: Tensor, k: Tensor) -> bool:
    """Whether torch's kernel for few queries can take them. It holds all that share a KV head in
    one tile, and refuses where they do not fit a block of the mask."""
    return q.shape[2] == 1 and q.shape[1] // k.shape[1] <= _BLOCK


def _one_block(mask: MaskMod, num_queries: int, num_keys: int, device: torch.device) -> BlockMask:
    """The mask, evaluated for each pair of a query and a key."""
    count = torch.ones(1, 1, 1, dtype=torch.int32, device=device)
    index = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=device)
    return BlockMask.from_kv_blocks(
        count,
        index,
        BLOCK_SIZE=(_WHOLE, _WHOLE),
        mask_mod=mask,
        seq_lengths=(num_queries, num_keys),
        compute_q_blocks=False,
    )


def _unchanged(score: Tensor, piece: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return score


@functools.cache
def _many_kernels() -> Any:
    """A context in which torch keeps so many kernels. Each that is made leaves a variable in its
    thread for ever: there is one."""
    # Here, and not above: every engine asks the backend whether it can run, and the import takes
    # seconds.
    import torch._dynamo.config as dynamo_config

    return dynamo_config.patch(
        recompile_limit=_MOST_KERNELS, accumulated_recompile_limit=_MOST_KERNELS
    )


@functools.cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
