"""CpuBackend: attention of every kind, in kernels of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from toolkit_lm.attention import (
    AttentionBackend,
    AttentionSpec,
    AttentionType,
    BatchView,
    GroupSetup,
    LayerParams,
    OffsetBias,
    common_refusal,
)
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
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
"""Keys, and elements of a head, that a vector holds."""
_MOST_SIZE = exported("MOST_SIZE")
_MOST_BIASES = 2**22
"""Most biases that are held at a time."""
_DTYPES = ("float32", "float16", "bfloat16")
_SIGHT: dict[str, int] = {
    AttentionType.CROSS: exported("SEE_ALL"),
    AttentionType.DECODER: exported("SEE_PAST"),
    AttentionType.ENCODER: exported("SEE_AROUND"),
}
"""What keys a token sees."""


@dataclass(slots=True)
class Metadata:
    """One step, or some of its tokens, as the kernels take them."""

    starts: np.ndarray
    """[R + 1] int32: each row's tokens, of these."""
    seen: np.ndarray
    """[R] int32: keys of each row."""
    first: np.ndarray
    """[R] int64: position of each row's first token, of these."""
    origins: np.ndarray
    """[R] int32: where each row's keys begin, of the step's tokens; used where nothing is
    cached."""
    table: Tensor | None
    """[R, most blocks] int32."""
    slots: Tensor | None
    """[T] int64."""
    spans: np.ndarray | None
    """[T, 2] int32, side by side: begin and end of each token's."""
    rows: Rows = field(init=False)
    """These, for the kernels."""
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
        """The tokens begin : end. Rows that have none of them are empty."""
        starts = self.starts.clip(begin, end)
        first = self.first + starts[:-1] - self.starts[:-1].clip(max=end)
        spans = None if self.spans is None else self.spans[begin:end]
        return Metadata(
            starts - np.int32(begin), self.seen, first, self.origins, self.table, None, spans
        )

    def positions(self) -> Tensor:
        """[T] int64, of all tokens."""
        return torch.from_numpy(
            np.arange(self.starts[-1])
            - np.repeat(self.starts[:-1] - self.first, np.diff(self.starts))
        )


class CpuBackend(AttentionBackend):
    """Exact attention in as many threads as torch has. Nothing is padded. Scores, softmax and sums
    are in float32.

    A page holds keys (num_kv_heads, block_size / 16, head_size / P, 16, P), where P is 2 in
    bfloat16 and else 1, and values (num_kv_heads, block_size / P, head_size, P). What a token gives
    does not depend on what is computed beside it.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"no kernel for device {spec.device}"
        if not usable_types():
            return refusal()
        if (reason := common_refusal(spec, _DTYPES)) is not None:
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
        pair = PAIRS[spec.dtype]
        heads = spec.num_kv_heads
        size = spec.head_size
        keys = (heads, spec.block_size // _TILE, size // pair, _TILE, pair)
        return [
            PageTensor(keys, spec.dtype),
            PageTensor((heads, spec.block_size // pair, size, pair), spec.dtype),
        ]

    def __init__(self, setup: GroupSetup) -> None:
        super().__init__(setup)
        layer = setup.layers[0]
        use_threads()
        self.size = -(-layer.head_size // _TILE) * _TILE
        """Of heads; zeros fill them up to it."""
        self.kernel = product_type(getattr(torch, layer.dtype), self.size)
        """Its number."""
        self._tables: dict[int, Tensor] = {}
        """Of the biases that depend on offsets, by identity: layers hold them for as long as the
        backend lives."""
        self._seen: set[int] = set()
        """Pages of the cache, by address."""

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
        """Before a layer's cache is first used: in huge pages, reading it seldom waits for an
        address."""
        if (address := kv_cache[0].data_ptr()) not in self._seen:
            self._seen.add(address)
            memory = kv_cache[0].untyped_storage()
            _kernels.in_huge_pages(memory.data_ptr(), memory.nbytes())

    def write_kv(
        self, layer: LayerParams, k: Tensor, v: Tensor, kv_cache: tuple[Tensor, ...], meta: Metadata
    ) -> None:
        assert meta.slots is not None
        self.see(kv_cache)
        k, v, (keys, values) = _side_by_side(k), _side_by_side(v), kv_cache
        _kernels.write_kv(
            self.kernel,
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
            kv_heads=layer.num_kv_heads,
            size=layer.head_size,
            block_size=keys.shape[2] * _TILE,
        )

    def forward(
        self,
        layer: LayerParams,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        kv_cache: tuple[Tensor, ...] | None,
        meta: Metadata,
        out: Tensor,
    ) -> None:
        q, to = _side_by_side(q), _side_by_side(out)
        if kv_cache is None:
            assert k is not None and v is not None
            keys = _side_by_side(k)
            values = _side_by_side(v)
        else:
            keys, values = kv_cache
        if layer.bias is None:
            self._attend(layer, q, keys, values, kv_cache is not None, meta, None, to)
        elif isinstance(layer.bias, OffsetBias):
            table = self._by_offset(layer.bias, int(meta.seen.max(initial=1)))
            self._attend(layer, q, keys, values, kv_cache is not None, meta, table, to)
        else:
            for begin, end, bias in _biases(layer, meta):
                self._attend(
                    layer,
                    q[begin:end],
                    keys,
                    values,
                    kv_cache is not None,
                    meta.part(begin, end),
                    bias,
                    to[begin:end],
                )
        if to is not out:
            out.copy_(to)

    def _attend(
        self,
        layer: LayerParams,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        cached: bool,
        meta: Metadata,
        bias: Tensor | None,
        out: Tensor,
    ) -> None:
        sinks = None if layer.sinks is None else layer.sinks.float()
        spans = meta.spans.ctypes.data if layer.spans and meta.spans is not None else 0
        _kernels.attend(
            self.kernel,
            meta.rows,
            queries=q.data_ptr(),
            keys=keys.data_ptr(),
            values=values.data_ptr(),
            out=out.data_ptr(),
            query_stride=q.stride(0),
            key_stride=keys.stride(0),
            value_stride=values.stride(0),
            out_stride=out.stride(0),
            block_tiles=keys.shape[2] if cached else 0,
            heads=layer.num_heads,
            kv_heads=layer.num_kv_heads,
            size=self.size,
            real=layer.head_size,
            scale=layer.scale,
            soft_cap=layer.soft_cap or 0.0,
            window=layer.window or 0,
            sight=_SIGHT[layer.attention_type],
            sinks=0 if sinks is None else sinks.data_ptr(),
            bias=0 if bias is None else bias.data_ptr(),
            bias_keys=0 if bias is None else bias.shape[-1],
            # Of biases by offset, offset 0 is in the middle.
            bias_center=bias.shape[1] // 2 if bias is not None and bias.ndim == 2 else -1,
            spans=spans,
        )

    def _by_offset(self, bias: OffsetBias, most: int) -> Tensor:
        """[num_heads, offsets] float32, of keys that are up to `most` before or after their query,
        or farther."""
        table = self._tables.get(id(bias))
        if table is None or table.shape[1] <= 2 * most:
            # It grows by doubling, so that most steps find one.
            table = self._tables[id(bias)] = (
                bias.by_offset(1 << most.bit_length()).float().contiguous()
            )
        return table


def _biases(layer: LayerParams, meta: Metadata) -> Iterator[tuple[int, int, Tensor]]:
    """(begin, end, biases [num_heads, end - begin, keys] of these tokens), for all of the
    step's."""
    assert layer.bias is not None
    positions = meta.positions()
    num_tokens = int(meta.starts[-1])
    keys = torch.arange(int(meta.seen.max(initial=0)))
    step = max(1, _MOST_BIASES // (layer.num_heads * max(1, len(keys))))
    for begin in range(0, num_tokens, step):
        end = min(begin + step, num_tokens)
        yield begin, end, layer.bias(positions[begin:end], keys).float().contiguous()


def _side_by_side(x: Tensor) -> Tensor:
    """x [T, heads, head_size] with a token's elements side by side, which they are as a model gives
    them."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
