"""FusedDecoderLayer: a decoder layer in one kernel call, with or without its feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from toolkit_lm.attention import AttentionType, LayerParams, current
from toolkit_lm.model import LayerParts, LinearBase, RMSNorm, Rotation
from torch import Tensor

from toolkit_lm_cpu.added import Added
from toolkit_lm_cpu.arena import Arena
from toolkit_lm_cpu.arguments import Layer, LinearPart, NormPart, Quantized
from toolkit_lm_cpu.backend import CpuBackend, Metadata
from toolkit_lm_cpu.float8 import Float8Panels
from toolkit_lm_cpu.library import _kernels, usable_types
from toolkit_lm_cpu.panels import ACTIVATIONS, LANES, PanelLinear
from toolkit_lm_cpu.quantized import QuantizedPanels, size_of_codes

_CACHE_FIELDS = (
    "key_pages",
    "value_pages",
    "key_page",
    "value_page",
    "block_tiles",
    "code",
    "key_scales",
    "value_scales",
    "scale_page",
)


class Inputs(NamedTuple):
    """Tensors that the layers of a step get one after the other, and work on in place."""

    x: Tensor
    residual: Tensor
    rotation: Rotation
    addresses: tuple[int, ...]
    """Addresses of x, the residual, cosines and sines; then the elements from one token's cosines
    to the next's, and the dimensions that turn."""

    @staticmethod
    def of(x: Tensor, residual: Tensor, rotation: Rotation) -> Inputs | None:
        """None: the kernels cannot take them."""
        cos = rotation.cos
        sin = rotation.sin
        size = cos.shape[-1]
        turns = (
            not rotation.interleaved
            and size % 2 == 0
            and cos.stride() == sin.stride()
            and cos.stride(2) == 1
        )
        if not turns or not x.is_contiguous():
            return None
        tensors = (x, residual, cos, sin)
        addresses = (*(tensor.data_ptr() for tensor in tensors), cos.stride(0), size)
        return Inputs(x, residual, rotation, addresses)


class Workspace:
    """Scratch memory and the last call's inputs, which the layers of a model share, since only one
    runs at a time."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._tensor = torch.empty(0)
        self._count = 0
        self._address = 0
        self.inputs: Inputs | None = None
        """The next layer mostly gets the same: addresses are found once in a step."""

    def pointer(self, count: int, dtype: torch.dtype) -> int:
        """The address of memory for `count` elements. Its contents are arbitrary."""
        if self._count < count or self._tensor.dtype is not dtype:
            self._tensor = self._arena.empty(count, dtype)
            self._count = count
            self._address = self._tensor.data_ptr()
        return self._address


class FusedDecoderLayer:
    """A decoder layer in one kernel call. It works in place on x and the residual."""

    def __init__(self, parts: LayerParts, workspace: Workspace) -> None:
        """Keeps the parts, for which `fits` must hold."""
        attention = parts.attn.params
        self.name = parts.attn.prefix
        self.dtype = parts.qkv.spec.dtype
        self.head_size = attention.head_size
        hidden = parts.qkv.input_size
        inner = max(0 if parts.down is None else parts.down.input_size, _embedding_size(parts))
        width = (
            2 * hidden
            + 2 * (attention.num_heads + attention.num_kv_heads) * attention.head_size
            + inner
        )
        self._type = next(iter(_types(parts)), usable_types()[self.dtype])
        codes = max(map(_size_of_codes, _products(parts)))
        self._memory = width + -(-codes // self.dtype.itemsize)
        """Elements of the workspace for a token."""
        self._workspace = workspace
        self._sinks = None if attention.sinks is None else attention.sinks.detach().float()
        """[heads], float32: a copy, unless the model has them so."""
        self._bound: object = None
        # Keeps alive what the kernels point to.
        self._parts = parts
        self._products: list[Any] = _products(parts)

    def _bind(self, backend: CpuBackend, kv_cache: tuple[Tensor, ...] | None) -> None:
        """Makes the kernels' layer, once the backend and the KV cache are known."""
        parts = self._parts
        attention = parts.attn.params
        hidden = parts.qkv.input_size
        query_norm, key_norm, *_ = *(parts.head_norms or ()), None, None
        gate, projection, gate_norm = parts.gate or (None, None, None)
        attended_norm, fed_norm = parts.out_norms or (None, None)
        cache = _cache(backend, attention, kv_cache)
        self._layer = _kernels.layer(
            Layer(
                type=self._type,
                attention_type=backend.kernels[parts.attn.params.head_size],
                element=self.dtype.itemsize,
                hidden=hidden,
                inner=0 if parts.down is None else parts.down.input_size,
                heads=attention.num_heads,
                kv_heads=attention.num_kv_heads,
                head_size=attention.head_size,
                projected=parts.qkv.output_size,
                activation=ACTIVATIONS[None if parts.gate_up is None else parts.gate_up.activation],
                factor=0.0 if parts.multiplier == 1 else parts.multiplier,
                input=_norm(parts.input_norm),
                post=_norm(parts.post_norm),
                queries=_norm(query_norm),
                keys=_norm(key_norm),
                values=_norm(parts.value_norm),
                attended=_norm(attended_norm),
                fed=_norm(fed_norm),
                qkv=_product(parts.qkv),
                out=_product(parts.out),
                gate_up=_product(parts.gate_up),
                down=_product(parts.down),
                scalar=0 if parts.scalar is None else parts.scalar.data_ptr(),
                gate=_product(gate),
                projection=_product(projection),
                gated=_norm(gate_norm),
                embedding_size=_embedding_size(parts),
                **cache,
                scale=attention.scale,
                soft_cap=attention.soft_cap or 0.0,
                window=attention.window or 0,
                sinks=0 if self._sinks is None else self._sinks.data_ptr(),
            )
        )
        self._bound = backend

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        rotation: Rotation,
        embedding: Tensor | None = None,
        shared: object = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """`shared`: a step's keys and values, which other layers read where there is no cache."""
        binding, meta = current(self.name)
        sums = self._parts.scalar is not None
        y = torch.empty_like(x) if residual is None and not sums else x
        total = x if residual is None else residual
        workspace = self._workspace
        inputs = workspace.inputs
        if (
            inputs is None
            or inputs.x is not y
            or inputs.residual is not total
            or inputs.rotation is not rotation
        ):
            inputs = workspace.inputs = Inputs.of(y, total, rotation)
        backend = binding.backend
        if type(backend) is not CpuBackend or inputs is None or x.dtype is not self.dtype:
            return None
        reads_keys = shared is not None or self._parts.attn.shares_with is not None
        if (reads_keys and binding.kv_cache is None) or not self._takes(embedding, len(x)):
            return None
        if self._bound is not backend:
            self._bind(backend, binding.kv_cache)
        step = cast(Metadata, meta)
        if self._sinks is not None and self._parts.attn.params.sinks is not None:
            # Others may have changed the model's.
            self._sinks.copy_(self._parts.attn.params.sinks)
        tokens = len(x)
        to, summed, cos, sin, angle_stride, angle_size = inputs.addresses
        _kernels.run_layer(
            self._layer,
            step.rows,
            self._adapted(tokens),
            x=summed if residual is None else to,
            residual=summed,
            y=to,
            adds=residual is not None,
            tokens=tokens,
            workspace=workspace.pointer(tokens * self._memory, self.dtype),
            cos=cos,
            sin=sin,
            angle_stride=angle_stride,
            angle_size=angle_size,
            slots=step.slots_at,
            embedding=0 if embedding is None else embedding.data_ptr(),
            embedding_stride=0 if embedding is None else embedding.stride(0),
        )
        if sums:
            return total, None
        return y if self._parts.feed_forward is None else self._parts.feed_forward(y), total

    def _takes(self, embedding: Tensor | None, tokens: int) -> bool:
        """Whether the kernels read such an embedding."""
        if embedding is None or self._parts.gate is None:
            return embedding is None and self._parts.gate is None
        shape = tokens, _embedding_size(self._parts)
        return (
            embedding.dtype is self.dtype
            and tuple(embedding.shape) == shape
            and embedding.stride(1) == 1
        )

    def _adapted(self, tokens: int) -> tuple[object, ...] | None:
        """Adapters of a step of so many tokens; None: there are none."""
        for linear in self._products:
            added = linear.method.added
            if added is not None and added.step.num_rows == tokens:
                return _adapted([linear.method.added for linear in self._products])
        return None


def fits(parts: LayerParts) -> bool:
    """Whether the kernels can compute the layer in one call."""
    products = _products(parts)
    # Nothing follows a feed-forward that its module computes.
    if (parts.gate_up is None or parts.down is None) and (
        parts.multiplier != 1
        or parts.out_norms is not None
        or parts.post_norm is None
        or parts.scalar is not None
    ):
        return False
    params = parts.attn.params
    size = parts.attn.params.head_size
    if not _has_known_keys(parts) or (parts.gate is not None and parts.scalar is None):
        return False
    scalar = parts.scalar
    if scalar is not None and (scalar.numel() != 1 or scalar.dtype is not parts.qkv.spec.dtype):
        return False
    return (
        all(
            isinstance(linear.method, QuantizedPanels)
            or (type(linear.method) is PanelLinear and linear.method.packed is not None)
            for linear in products
        )
        and not any(linear.is_sharded for linear in (parts.out, parts.down) if linear is not None)
        and (parts.gate_up is None or parts.gate_up.activation in ACTIVATIONS)
        and parts.multiplier != 0
        and all(linear.input_size % LANES == 0 for linear in products)
        and size % LANES == 0
        and len(_types(parts)) <= 1
        and len({linear.spec.dtype for linear in products}) == 1
        and params.attention_type is AttentionType.DECODER
        and params.bias is None
        and not params.spans
    )


def _has_known_keys(parts: LayerParts) -> bool:
    """Whether the kernels know which of queries, keys and values the layer projects."""
    params = parts.attn.params
    queries, keys = (heads * params.head_size for heads in (params.num_heads, params.num_kv_heads))
    if parts.attn.shares_with is not None:
        return parts.qkv.output_size == queries
    # Values that are keys are the norm's output.
    return parts.qkv.output_size == queries + 2 * keys or (
        parts.value_norm is not None and parts.qkv.output_size == queries + keys
    )


def _products(parts: LayerParts) -> list[LinearBase]:
    products: list[LinearBase] = [parts.qkv, parts.out]
    if parts.gate_up is not None and parts.down is not None:
        products += parts.gate_up, parts.down
    if parts.gate is not None:
        products += parts.gate[:2]
    return products


def _embedding_size(parts: LayerParts) -> int:
    return 0 if parts.gate is None else parts.gate[1].input_size


def _adapted(added: Sequence[Added | None]) -> tuple[object, ...]:
    """Adapters' shares of the products, as the kernels read them."""
    groups = next(those.step.groups for those in added if those is not None)
    low_ranks = [None if those is None else those.low_ranks for those in added]
    return groups, *low_ranks, *([None] * (6 - len(low_ranks)))


def _types(parts: LayerParts) -> set[int]:
    """Numbers of the kernels of all products but those of codes, which are the same by all."""
    return {
        linear.method.type
        for linear in _products(parts)
        if isinstance(linear.method, (PanelLinear, Float8Panels))
    }


def _size_of_codes(linear: LinearBase) -> int:
    method = linear.method
    return size_of_codes(method.quantized) if isinstance(method, QuantizedPanels) else 0


def _norm(norm: RMSNorm | None) -> NormPart:
    if norm is None:
        return NormPart()
    weight = norm.weight
    return NormPart(
        weight=weight.data_ptr(),
        size=len(weight),
        eps=norm.eps,
        is_wide=weight.dtype is torch.float32,
    )


def _cache(
    backend: CpuBackend, attention: LayerParams, kv_cache: tuple[Tensor, ...] | None
) -> dict[str, int]:
    """The cache's fields of Layer."""
    if kv_cache is None:
        return dict.fromkeys(_CACHE_FIELDS, 0)
    backend.see(kv_cache)
    keys, values = kv_cache[:2]
    codes = backend.codes(attention, kv_cache)
    pages = keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), keys.shape[2]
    return dict(zip(_CACHE_FIELDS, (*pages, *codes), strict=True))


def _product(linear: LinearBase | None) -> LinearPart:
    if linear is None:
        return LinearPart()
    method = cast(PanelLinear | QuantizedPanels, linear.method)
    packed = method.packed
    assert packed is not None
    bias = linear.bias
    return LinearPart(
        weights=packed.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        quantized=method.quantized if isinstance(method, QuantizedPanels) else Quantized(),
    )
