"""CpuBackend: attention of all types in the kernels of this distribution."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from toolkit_lm.attention import (
    AttentionBackend,
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchView,
    GroupSetup,
    LayerParams,
    OffsetBias,
    common_refusal,
)
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
from toolkit_lm_paged_attention import OffsetTables
from torch import Tensor

from toolkit_lm_cpu.arguments import Rows
from toolkit_lm_cpu.library import (
    PAIRS,
    _kernels,
    exported,
    product_type,
    refusal,
    usable_types,
    use_threads,
)

_TILE = exported("TILE")
"""Keys, or elements of a head, per vector of the kernels."""
_MOST_SIZE = exported("MOST_SIZE")
_MOST_BIASES = 2**22
"""Most biases that are held at a time."""
_DTYPES = ("float32", "float16", "bfloat16")
_CODES = {"int8": exported("AS_INT8"), "float8_e4m3fn": exported("AS_E4M3")}
"""The kernels' number of what a quantized cache holds, by its dtype."""
_CACHES = (("int8", "token"), ("float8_e4m3fn", "token"), ("float8_e4m3fn", "layer"))
"""Dtype and `scales` of the quantized caches that the kernels read."""
_SIGHT: dict[str, int] = {
    AttentionType.CROSS: exported("SEE_ALL"),
    AttentionType.DECODER: exported("SEE_PAST"),
    AttentionType.ENCODER: exported("SEE_AROUND"),
}
"""The kernels' code for the keys that a token sees, by attention type."""


@dataclass(slots=True)
class Metadata:
    """A step, or a range of its tokens, in the form that the kernels take."""

    starts: np.ndarray
    """[R + 1] int32: offsets of the rows' tokens in this range."""
    seen: np.ndarray
    """[R] int32: number of keys of each row."""
    first: np.ndarray
    """[R] int64: position of each row's first token in this range."""
    origins: np.ndarray
    """[R] int32: offset of each row's keys in the step's tokens. Used only without a KV cache."""
    table: Tensor | None
    """Block table, [R, most blocks] int32."""
    slots: Tensor | None
    """Slot mapping, [T] int64."""
    spans: np.ndarray | None
    """[T, 2] int32, contiguous: begin and end of each token's span."""
    rows: Rows = field(init=False)
    """Addresses of these arrays, as the kernels' struct."""
    slots_at: int = field(init=False)

    def __post_init__(self) -> None:
        table = (0, 0) if self.table is None else (self.table.data_ptr(), self.table.stride(0))
        (starts, _) = self.starts.__array_interface__["data"]
        (seen, _) = self.seen.__array_interface__["data"]
        (first, _) = self.first.__array_interface__["data"]
        (origins, _) = self.origins.__array_interface__["data"]
        self.rows = Rows(starts, seen, first, origins, len(self.seen), *table)
        self.slots_at = 0 if self.slots is None else self.slots.data_ptr()

    def part(self, begin: int, end: int) -> Metadata:
        """The metadata of the tokens begin : end. Rows without any of them are empty."""
        starts = self.starts.clip(begin, end)
        first = self.first + starts[:-1] - self.starts[:-1].clip(max=end)
        spans = None if self.spans is None else self.spans[begin:end]
        return Metadata(
            starts - np.int32(begin), self.seen, first, self.origins, self.table, None, spans
        )

    def positions(self) -> Tensor:
        """Positions of all tokens, [T] int64."""
        return torch.from_numpy(
            np.arange(self.starts[-1])
            - np.repeat(self.starts[:-1] - self.first, np.diff(self.starts))
        )


class Codes(NamedTuple):
    """How a cache is quantized, for the kernels: Step of step.h. Scales are addresses."""

    code: int = 0
    key_scales: int = 0
    value_scales: int = 0
    scale_page: int = 0

    @classmethod
    def of(cls, layer: LayerParams, kv_cache: tuple[Tensor, ...], code: int) -> Codes:
        if len(kv_cache) == 3:
            scales = kv_cache[2]
            return cls(code, scales[0, 0].data_ptr(), scales[0, 1].data_ptr(), scales.stride(0))
        assert layer.k_scale is not None and layer.v_scale is not None
        return cls(code, layer.k_scale.data_ptr(), layer.v_scale.data_ptr())


_NOT_QUANTIZED = Codes()


class CpuBackend(AttentionBackend):
    """Exact attention without padding, in as many threads as torch has. Scores, softmax and sums
    are in float32.

    The keys of a page are (num_kv_heads, block_size / 16, head_size / P, 16, P). Its values are
    (num_kv_heads, block_size / P, head_size, P). P is 2 in bfloat16 and else 1. A quantized page
    has P = 2, and where it has scales they come last: (2, num_kv_heads, block_size), float32.

    """

    batch_invariant = True

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"no kernel for device {spec.device}"
        if not usable_types():
            return refusal()
        if (reason := common_refusal(spec, _DTYPES, _CACHES)) is not None:
            return reason
        if spec.head_size > _MOST_SIZE:
            return f"head_size {spec.head_size} is above {_MOST_SIZE}"
        if spec.kv_cache is not None:
            if spec.head_size % _TILE:
                return (
                    f"head_size {spec.head_size} is not a multiple of {_TILE}, as what is cached "
                    "must be"
                )
            if spec.kv_cache.block_size % _TILE:
                return f"block_size {spec.kv_cache.block_size} is not a multiple of {_TILE}"
        return None

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, FullSpec)
        pair = 2 if spec.dtype in _CODES else PAIRS[spec.dtype]
        heads = spec.num_kv_heads
        size = spec.head_size
        keys = (heads, spec.block_size // _TILE, size // pair, _TILE, pair)
        page = [
            PageTensor(keys, spec.dtype),
            PageTensor((heads, spec.block_size // pair, size, pair), spec.dtype),
        ]
        if spec.scales == "token":
            page.append(PageTensor((2, heads, spec.block_size), "float32"))
        return page

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        use_threads()
        # Layers without a cache are one group, whatever their heads are like.
        padded = {layer.head_size: -(-layer.head_size // _TILE) * _TILE for layer in setup.layers}
        self.sizes = padded
        """Head sizes in the kernels, padded with zeros to a multiple of a vector, by head size."""
        dtype = getattr(torch, setup.layers[0].dtype)
        self.kernels = {size: product_type(dtype, padded[size]) for size in padded}
        """Numbers of the kernels in use, by dtype and instruction set, by head size."""
        cache = setup.kv_cache
        self.code = _CODES.get(cache.dtype, 0) if isinstance(cache, FullSpec) else 0
        """The kernels' number of what the cache holds. 0: the layer's elements."""
        self._offset_tables = OffsetTables(setup.device)
        self._seen: set[int] = set()
        """Addresses of the KV caches that were advised to use huge pages."""

    def build(self, batch: BatchView) -> Metadata:
        starts = batch.query_start
        spans = batch.spans
        if spans is not None:
            spans = np.ascontiguousarray(spans, np.int32)
            assert (spans[:, 1] <= np.repeat(batch.seq_lens, np.diff(starts)).clip(1)).all(), (
                "a span ends after the step"
            )
        return Metadata(
            starts,
            batch.seq_lens,
            batch.starts,
            starts[:-1],
            batch.block_table,
            batch.slot_mapping,
            spans,
        )

    def see(self, kv_cache: tuple[Tensor, ...]) -> None:
        """Advises huge pages for a layer's KV cache at its first use, so that reads seldom miss the
        TLB."""
        if (address := kv_cache[0].data_ptr()) not in self._seen:
            self._seen.add(address)
            memory = kv_cache[0].untyped_storage()
            _kernels.in_huge_pages(memory.data_ptr(), memory.nbytes())

    def codes(self, layer: LayerParams, kv_cache: tuple[Tensor, ...]) -> Codes:
        """How the layer's cache is quantized."""
        return Codes.of(layer, kv_cache, self.code) if self.code else _NOT_QUANTIZED

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.v is not None and call.kv_cache is not None
        meta: Metadata = call.metadata
        assert meta.slots is not None
        self.see(call.kv_cache)
        k = _side_by_side(call.k)
        v = _side_by_side(call.v)
        keys, values = call.kv_cache[:2]
        codes = self.codes(call.layer, call.kv_cache)
        _kernels.write_kv(
            self.kernels[call.layer.head_size],
            keys=k.data_ptr(),
            values=v.data_ptr(),
            to_keys=keys.data_ptr(),
            to_values=values.data_ptr(),
            key_stride=k.stride(0),
            value_stride=v.stride(0),
            key_page=keys.stride(0),
            value_page=values.stride(0),
            slots=meta.slots_at,
            tokens=len(meta.slots),
            kv_heads=call.layer.num_kv_heads,
            size=call.layer.head_size,
            block_size=keys.shape[2] * _TILE,
            code=codes.code,
            key_scales=codes.key_scales,
            value_scales=codes.value_scales,
            scale_page=codes.scale_page,
        )

    def forward(self, call: AttentionCall) -> None:
        meta: Metadata = call.metadata
        layer = call.layer
        q = _side_by_side(call.q)
        out = _side_by_side(call.out)
        if call.kv_cache is None:
            assert call.k is not None and call.v is not None
            keys = _side_by_side(call.k)
            values = _side_by_side(call.v)
        else:
            keys, values = call.kv_cache[:2]
        whole = AttentionCall(layer, q, keys, values, call.kv_cache, meta, out)
        if layer.bias is None:
            self._attend(whole, keys, values, None)
        elif isinstance(layer.bias, OffsetBias):
            table = self._offset_tables.find(layer.bias, int(meta.seen.max(initial=1)))
            self._attend(whole, keys, values, table)
        else:
            for begin, end, bias in _biases(layer, meta):
                part = replace(
                    whole, q=q[begin:end], metadata=meta.part(begin, end), out=out[begin:end]
                )
                self._attend(part, keys, values, bias)
        if out is not call.out:
            call.out.copy_(out)

    def _attend(
        self, call: AttentionCall, keys: Tensor, values: Tensor, bias: Tensor | None
    ) -> None:
        """Computes attention for the queries of `call`.

        q and out have the elements of a token side by side. Keys and values are the cache's, or the
        step's own without a cache.
        """
        layer = call.layer
        meta: Metadata = call.metadata
        q = call.q
        out = call.out
        sinks = None if layer.sinks is None else layer.sinks.float()
        codes = _NOT_QUANTIZED if call.kv_cache is None else self.codes(layer, call.kv_cache)
        spans = meta.spans.ctypes.data if layer.spans and meta.spans is not None else 0
        _kernels.attend(
            self.kernels[layer.head_size],
            meta.rows,
            queries=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            out=out.data_ptr(),
            query_stride=q.stride(0),
            key_stride=keys.stride(0),
            value_stride=values.stride(0),
            out_stride=out.stride(0),
            block_tiles=0 if call.kv_cache is None else keys.shape[2],
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            size=self.sizes[layer.head_size],
            real=layer.head_size,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            window=layer.window or 0,
            sight=_SIGHT[layer.attention_type],
            sinks=0 if sinks is None else sinks.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            bias_keys=0 if bias is None else bias.shape[-1],
            # Offset 0 is in the middle of biases by offset.
            bias_center=bias.shape[1] // 2 if bias is not None and bias.ndim == 2 else -1,
            spans=spans,
            code=codes.code,
            key_scales=codes.key_scales,
            value_scales=codes.value_scales,
            scale_page=codes.scale_page,
        )


def _biases(layer: LayerParams, meta: Metadata) -> Iterator[tuple[int, int, Tensor]]:
    """Yields (begin, end, biases) until all tokens of the step are covered.

    The biases are [num_heads, end - begin, keys] float32, of the tokens begin : end.
    """
    assert layer.bias is not None
    positions = meta.positions()
    num_tokens = int(meta.starts[-1])
    keys = torch.arange(int(meta.seen.max(initial=0)))
    step = max(1, _MOST_BIASES // (layer.num_heads * max(1, len(keys))))
    for begin in range(0, num_tokens, step):
        end = min(begin + step, num_tokens)
        yield begin, end, layer.bias(positions[begin:end], keys).float().contiguous()


def _side_by_side(x: Tensor) -> Tensor:
    """Makes the elements of a token in x [T, heads, head_size] contiguous. Models' own tensors are
    so already."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
