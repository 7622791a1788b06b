"""The kernels that may be there, and what each can do."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from toolkit_lm_paged_attention import gpu_refusal
from torch import Tensor

from toolkit_lm_flash_attn.arguments import Arguments

Attend = Callable[[Tensor, Tensor, Tensor, Arguments, float, float | None], Tensor]
"""(q [T, heads, size], k, v [K, kv_heads, size] or pages [num_blocks, block_size, kv_heads, size],
arguments, scale, soft cap) -> as q."""

_OLDEST = (8, 0)
"""Compute capability of the oldest GPUs that have the kernels: Ampere."""


class Kernel(NamedTuple):
    name: str
    attend: Attend
    soft_caps: bool
    page_step: int | None
    """Divisor of the block sizes that the kernel can read. None: it cannot read pages."""
    dtypes: tuple[str, ...] = ("bfloat16", "float16")
    head_step: int = 8
    """Divisor of the head sizes that the kernel supports."""
    most_head_size: int = 256

    def pages(self, block_size: int | None) -> bool:
        """Whether the kernel reads blocks of that size out of the cache."""
        return (
            block_size is not None
            and self.page_step is not None
            and block_size % self.page_step == 0
        )


def refusal() -> str | None:
    """Why no kernel can run on the GPU. None: one can."""
    if find_kernel() is None:
        return "neither the package flash_attn is installed, nor does torch have FlashAttention"
    return gpu_refusal("FlashAttention", _OLDEST)


@functools.cache
def find_kernel() -> Kernel | None:
    """Kernel of the package flash_attn, else torch's own, else None."""
    if importlib.util.find_spec("flash_attn") is not None:
        return Kernel("flash_attn", _attend_by_package, soft_caps=True, page_step=256)
    if (
        torch.backends.cuda.is_flash_attention_available()
        and importlib.util.find_spec("torch.nn.attention.varlen") is not None
    ):
        return Kernel("torch", _attend_by_torch, soft_caps=False, page_step=None)
    return None


def _attend_by_package(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, scale: float, soft_cap: float | None
) -> Tensor:
    from flash_attn import flash_attn_varlen_func

    found: Tensor = flash_attn_varlen_func(
        *(q, k, v),
        cu_seqlens_q=arguments.query_start,
        cu_seqlens_k=arguments.key_start,
        max_seqlen_q=arguments.max_queries,
        max_seqlen_k=arguments.max_keys,
        softmax_scale=scale,
        causal=arguments.causal,
        window_size=arguments.window,
        softcap=soft_cap or 0.0,
        block_table=arguments.block_table,
    )
    return found


def _attend_by_torch(
    q: Tensor, k: Tensor, v: Tensor, arguments: Arguments, scale: float, soft_cap: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # PyTorch 2.11 takes shared KV heads as they come. Later ones ask to be told of them.
    heads: dict[str, Any] = (
        {"enable_gqa": q.shape[1] != k.shape[1]} if _takes(varlen_attn, "enable_gqa") else {}
    )
    # It has no argument of its own for causal attention, which is a window that ends at the query.
    found: Any = varlen_attn(
        *(
            q,
            k,
            v,
            arguments.query_start,
            arguments.key_start,
            arguments.max_queries,
            arguments.max_keys,
        ),
        scale=scale,
        window_size=arguments.window,
        **heads,
    )
    assert isinstance(found, Tensor)
    return found


@functools.cache
def _takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of that name."""
    return name in inspect.signature(function).parameters
