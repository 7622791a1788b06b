"""FusedDecoderLayer: a decoder layer in one call of the kernels, or all of it but its
feed-forward."""

from __future__ import annotations

from typing import cast

import torch
from toolkit_lm.attention import AttentionType, current
from toolkit_lm.model import LayerParts, LinearBase, RMSNorm, Rotation
from torch import Tensor

from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.backend import SIGHT, CpuBackend, Metadata
from toolkit_lm_cpu.library import _kernels, product_type
from toolkit_lm_cpu.panels import ACTIVATIONS, LANES, PanelLinear


class Workspace:
    """Memory that the layers of a model share: one runs at a time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._tensor = torch.empty(0)

    def pointer(self, count: int, dtype: torch.dtype) -> int:
        """Of room for `count` elements."""
        if self._tensor.numel() < count or self._tensor.dtype is not dtype:
            self._tensor = self._arena.empty(count, dtype)
        return self._tensor.data_ptr()


class FusedDecoderLayer:
    """Computes in place what it is given: x and its residual."""

    def __init__(self, parts: LayerParts, workspace: Workspace) -> None:
        """`parts` are such that `fits`."""
        attention = parts.attn.params
        self.name = parts.attn.prefix
        self.dtype = parts.qkv.spec.dtype
        self.head_size = attention.head_size
        hidden = parts.qkv.input_size
        inner = 0 if parts.down is None else parts.down.input_size
        self._width = (
            2 * hidden
            + 2 * (attention.num_heads + attention.num_kv_heads) * attention.head_size
            + inner
        )
        self._workspace = workspace
        self._attention = attention.scale, attention.soft_cap or 0.0, attention.window or 0
        self._bound: object = None
        # What the kernels point to stays.
        self._parts = parts
        self._sizes = (
            hidden,
            inner,
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_size,
        )

    def _bind(self, backend: CpuBackend, kv_cache: tuple[Tensor, ...] | None) -> None:
        """Once the layer has its backend and its cache."""
        parts = self._parts
        type_ = product_type(self.dtype, self._sizes[0])
        norms = (
            parts.input_norm,
            parts.post_norm,
            *(parts.head_norms or (None, None)),
            *(parts.out_norms or (None, None)),
        )
        self._layer = _kernels.layer(
            (type_, backend.kernel, self.dtype.itemsize),
            self._sizes,
            0 if parts.gate_up is None else ACTIVATIONS[parts.gate_up.activation],
            0.0 if parts.multiplier == 1 else parts.multiplier,
            *(_norm(norm) for norm in norms),
            *(_product(linear) for linear in (parts.qkv, parts.out, parts.gate_up, parts.down)),
        )
        if kv_cache is None:
            self._cache = (0, 0, 0, 0), 0
        else:
            backend.see(kv_cache)
            pages_k, pages_v = kv_cache
            self._cache = (
                (pages_k.data_ptr(), pages_v.data_ptr(), pages_k.stride(0), pages_v.stride(0)),
                pages_k.shape[2],
            )
        self._bound = backend

    def __call__(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor] | None:
        binding, meta = current(self.name)
        cos = rotation.cos
        sin = rotation.sin
        size = rotation.cos.shape[-1]
        turns = (
            not rotation.interleaved
            and size % 2 == 0
            and cos.stride() == sin.stride()
            and cos.stride(2) == 1
        )
        if (
            type(binding.backend) is not CpuBackend
            or not turns
            or not x.is_contiguous()
            or x.dtype is not self.dtype
        ):
            return None
        if self._bound is not binding.backend:
            self._bind(binding.backend, binding.kv_cache)
        step = cast(Metadata, meta)
        y, total = (torch.empty_like(x), x) if residual is None else (x, residual)
        pages, tiles = self._cache
        _kernels.run_layer(
            self._layer,
            (
                x.data_ptr(),
                total.data_ptr(),
                y.data_ptr(),
                residual is not None,
                len(x),
                self._workspace.pointer(len(x) * self._width, x.dtype),
            ),
            (cos.data_ptr(), sin.data_ptr(), cos.stride(0), size),
            step.arguments,
            (*pages, 0 if step.slots is None else step.slots.data_ptr(), tiles),
            self._attention,
            SIGHT[AttentionType.DECODER],
        )
        return y if self._parts.feed_forward is None else self._parts.feed_forward(y), total


def fits(parts: LayerParts) -> bool:
    """Whether the kernels can compute the layer in one call."""
    products: list[LinearBase] = [parts.qkv, parts.out]
    # Nothing follows a feed-forward that its module computes.
    if parts.gate_up is not None and parts.down is not None:
        products += parts.gate_up, parts.down
    elif parts.multiplier != 1 or parts.out_norms is not None or parts.post_norm is None:
        return False
    params = parts.attn.params
    size = parts.attn.params.head_size
    return (
        all(
            type(linear.method) is PanelLinear and linear.method.packed is not None
            for linear in products
        )
        and not any(linear.is_sharded for linear in (parts.out, parts.down) if linear is not None)
        and (parts.gate_up is None or parts.gate_up.activation in ACTIVATIONS)
        and parts.multiplier != 0
        and all(linear.input_size % LANES == 0 for linear in products)
        and size % LANES == 0
        and len({product_type(linear.spec.dtype, linear.input_size) for linear in products}) == 1
        and params.attention_type is AttentionType.DECODER
        and params.bias is None
        and params.sinks is None
        and not params.spans
    )


def _norm(norm: RMSNorm | None) -> tuple[int, int, float, bool]:
    if norm is None:
        return 0, 0, 0.0, False
    return norm.weight.data_ptr(), len(norm.weight), norm.eps, norm.weight.dtype is torch.float32


def _product(linear: LinearBase | None) -> tuple[int, int]:
    if linear is None:
        return 0, 0
    packed = cast(PanelLinear, linear.method).packed
    assert packed is not None
    return packed.data_ptr(), 0 if linear.bias is None else linear.bias.data_ptr()
