"""FusedDecoderLayer: a decoder layer of the usual kind that rotates keys straight into the
cache."""

from __future__ import annotations

from types import ModuleType

import torch
from toolkit_lm.attention import AttentionCall, AttentionType, current
from toolkit_lm.model import LayerParts, Rotation
from torch import Tensor

from toolkit_lm_triton.backend import TritonBackend
from toolkit_lm_triton.device import LAUNCH
from toolkit_lm_triton.pieces import power_of_2


class FusedDecoderLayer:
    """The layer's modules, but for one kernel that rotates queries and keys, and writes keys and
    values to the cache."""

    def __init__(self, parts: LayerParts, kernels: ModuleType) -> None:
        """Keeps the parts, for which `fits` must hold."""
        self._parts = parts
        self._kernels = kernels

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor] | None:
        parts = self._parts
        params = self._parts.attn.params
        binding, meta = current(parts.attn.prefix)
        backend = binding.backend
        cache = binding.kv_cache
        cos = rotation.cos
        sin = rotation.sin
        turns = cos.shape[-1] % 2 == 0 and cos.stride() == sin.stride() and cos.stride(2) == 1
        assert (
            parts.input_norm is not None
            and parts.post_norm is not None
            and parts.gate_up is not None
            and parts.down is not None
        )
        if type(backend) is not TritonBackend or cache is None or not turns or not len(x):
            return None
        if len(cache) > 1 or params.k_scale is not None:
            # The kernel stores no codes, which a quantized cache holds.
            return None
        if residual is None:
            x, residual = parts.input_norm(x), x
        else:
            x, residual = parts.input_norm(x, residual)
        heads = parts.qkv(x).view(len(x), -1, params.head_size)
        q, k, v = heads.split([params.num_heads, params.num_kv_heads, params.num_kv_heads], dim=1)
        if parts.head_norms is not None:
            q, k = parts.head_norms[0](q), parts.head_norms[1](k)
        self._rotate_and_store(q, k, v, rotation, cache, meta.batch.slot_mapping)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        backend.forward(AttentionCall(params, q, None, None, cache, meta, out))
        x, residual = parts.post_norm(parts.out(out.flatten(1)), residual)
        return parts.down(parts.gate_up(x)), residual

    def _rotate_and_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        cache: tuple[Tensor, ...],
        slots: Tensor,
    ) -> None:
        """q, k and v [T, heads, head_size], whose heads' elements lie side by side."""
        (keys, values) = cache[0].unbind(1)
        half = rotation.cos.shape[-1] // 2
        params = self._parts.attn.params
        self._kernels.rotate_and_store[len(q), params.num_heads + params.num_kv_heads](
            *(q, k, v, rotation.cos, rotation.sin, keys, values, slots),
            *(
                q.stride(0),
                q.stride(1),
                k.stride(0),
                k.stride(1),
                v.stride(0),
                v.stride(1),
                rotation.cos.stride(0),
                *keys.stride()[:3],
            ),
            HEADS=params.num_heads,
            KV_HEADS=params.num_kv_heads,
            SIZE=params.head_size,
            SIZE_FILLED=power_of_2(params.head_size),
            HALF=half,
            HALF_FILLED=power_of_2(half),
            INTERLEAVED=rotation.interleaved,
            BLOCK_SIZE=keys.shape[1],
            num_warps=1,
            **LAUNCH,
        )


def fits(parts: LayerParts) -> bool:
    """Whether such a layer computes what the modules do."""
    are_there = None not in (parts.input_norm, parts.post_norm, parts.gate_up, parts.down)
    adds_plainly = parts.multiplier == 1 and parts.out_norms is None
    ends_plainly = parts.scalar is None and parts.gate is None
    has_plain_keys = parts.attn.shares_with is None and parts.value_norm is None
    norms_heads = all(
        len(norm.weight) == parts.attn.params.head_size for norm in parts.head_norms or ()
    )
    return (
        parts.attn.params.attention_type is AttentionType.DECODER
        and are_there
        and adds_plainly
        and ends_plainly
        and has_plain_keys
        and norms_heads
    )
