"""The attention function that modules of transformers call, and what they ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from toolkit_lm.attention import Attention
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "toolkit_lm"
"""Name of our function among transformers' attention implementations. No mask function has this
name, so no masks are made for it."""
EXAMINED = "toolkit_lm_examined"
"""Name of our attention function while a model is examined. Masks are then made to be read
(`describe_mask`), not applied."""
LAYER = "toolkit_lm_paged_attention"
"""The attribute of an attention module that holds the Attention layer it calls."""
NOT_CAUSAL = "its attention is not causal"
_CALLS = "toolkit_lm_calls"
_WINDOW = "toolkit_lm_window"
"""The attribute of a mask that holds its window: 0 where it is causal and no more."""
_SEEN = 12
"""Tokens by which masks are read, in addition to those of their window."""
_HARMLESS = ("cache_position", "position_embeddings", "position_ids")
"""Tensors that modules hand on and that attention over a paged cache needs not."""


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """Arguments of attention in one call of a module."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float | None
    window: int | None
    soft_cap: float | None
    refusal: str | None
    """Why an Attention layer cannot do it; None when it can."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of the flat batch as transformers asks for it: query [1, H, T, D], key and value
    [1, KV heads, T, D] -> [1, T, H, D].

    Runs the module's Attention layer. A module that has none is being examined: its call is noted,
    and the result has a shape only.
    """
    num_heads, num_tokens, head_size = query.shape[1:]
    layer: Attention | None = getattr(module, LAYER, None)
    if layer is not None:
        flat = layer(*(x.transpose(1, 2).reshape(num_tokens, -1) for x in (query, key, value)))
        return flat.view(1, num_tokens, num_heads, head_size), None
    of_mask: int = getattr(attention_mask, _WINDOW, 0)
    window = of_mask if sliding_window is None else sliding_window
    refusal = _refusal(module, query, key, value, attention_mask, window, options)
    call = ModuleCall(
        num_heads, key.shape[1], head_size, scaling, window or None, softcap or None, refusal
    )
    vars(module).setdefault(_CALLS, []).append(call)
    return query.new_empty(1, num_tokens, num_heads, value.shape[-1]), None


def calls_of(module: nn.Module) -> list[ModuleCall]:
    """The calls that `attend` noted of a module."""
    calls: list[ModuleCall] = vars(module).get(_CALLS, [])
    return calls


def describe_mask(
    *, q_length: int, kv_length: int, mask_function: Any, local_size: int | None = None, **_: Any
) -> Tensor:
    """A mask [1, 1, q_length, kv_length] that states only its window. Transformers calls this to
    make masks while a model is examined.

    `mask_function` says of any batch, head, query and key whether the query sees the key."""
    mask = torch.empty(1, 1, q_length, kv_length, dtype=torch.bool, device="meta")
    window = local_size or 0
    # Windows may be too large for all of a mask to be looked at: rows on both sides of their ends
    # are.
    rows = torch.tensor(sorted({*range(_SEEN), *range(window, window + _SEEN)}), device="cpu")[
        :, None
    ]
    keys = torch.cat(
        [
            torch.arange(_SEEN, device="cpu").expand(len(rows), -1),
            rows - window,
            rows - window + 1,
            rows,
            rows + 1,
        ],
        dim=1,
    )
    zero = torch.zeros((), dtype=torch.long, device="cpu")
    expected = (keys <= rows) & ((keys > rows - window) | (window == 0))
    try:
        is_known = torch.equal(
            mask_function(zero, zero, rows, keys) & (keys >= 0), expected & (keys >= 0)
        )
    except Exception:
        # It reads tensors that have no values here.
        is_known = False
    if is_known:
        setattr(mask, _WINDOW, window)
    return mask


def _refusal(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    window: int,
    options: Mapping[str, Any],
) -> str | None:
    is_causal = options.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return NOT_CAUSAL
    if attention_mask is not None:
        masked: int | None = getattr(attention_mask, _WINDOW, None)
        if masked is None:
            return "it makes an attention mask of its own"
        if masked != window:
            return f"its window is {window}, and that of its mask {masked}"
    if key.shape != value.shape or key.shape[-1] != query.shape[-1]:
        return (
            f"its queries, keys and values differ in size: {query.shape[-1]}, {key.shape[-1]} "
            f"and {value.shape[-1]}"
        )
    extra = [
        name
        for name, option in options.items()
        if isinstance(option, Tensor) and name not in _HARMLESS
    ]
    return f"its attention takes {', '.join(extra)}, which is not supported" if extra else None


AttentionInterface.register(NAME, attend)
AttentionInterface.register(EXAMINED, attend)
AttentionMaskInterface.register(EXAMINED, describe_mask)
