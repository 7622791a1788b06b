"""Attention of all rows at once: queries and keys of each row are padded to those of the longest.

R rows, T tokens, Q most queries of a row, K most keys of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from toolkit_lm.attention import (
    AttentionBackend,
    AttentionCall,
    AttentionSpec,
    AttentionType,
    BatchView,
    LayerParams,
    common_refusal,
)
from toolkit_lm.kv import FullSpec, KVCacheSpec, PageTensor
from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
LACKS = ("sinks", "bias", "spans")


@dataclass(frozen=True)
class PaddedStep:
    """One step, made once for all layers of a group."""

    batch: BatchView
    row: Tensor
    """[T]: the row that each token belongs to."""
    column: Tensor
    """[T]: its place among that row's tokens."""
    lengths: Tensor
    """[R, 1]: the row's tokens."""
    keys: Tensor
    """[K]: 0, 1, 2, ..."""


class PaddedBackend(AttentionBackend):
    """Decoders, and encoders without a cache.

    A page of the KV cache holds keys, then values: (block_size, num_kv_heads, head_size) each.
    """

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if refusal := common_refusal(spec, DTYPES):
            return refusal
        if spec.type is AttentionType.CROSS:
            return "it runs no cross attention"
        if spec.type is AttentionType.ENCODER and spec.kv_cache is not None:
            return "it caches nothing of encoders"
        asked = [name for name in LACKS if getattr(spec, name)]
        return f"no kernel for {' and '.join(asked)}" if asked else None

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> Sequence[PageTensor]:
        assert isinstance(spec, FullSpec)
        shape = (spec.block_size, spec.num_kv_heads, spec.head_size)
        return [PageTensor(shape, spec.dtype)] * 2

    def build(self, batch: BatchView) -> PaddedStep:
        starts = batch.query_start_device.long()
        lengths = starts.diff()
        row = torch.arange(batch.num_rows, device=starts.device).repeat_interleave(lengths)
        column = torch.arange(batch.num_tokens, device=starts.device) - starts[row]
        # Without a cache, a row's keys are its tokens. An encoder may see fewer of them.
        most = batch.max_seq_len if batch.block_table is not None else batch.max_query_len
        keys = torch.arange(most, device=starts.device)
        return PaddedStep(batch, row, column, lengths[:, None], keys)

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.v is not None and call.kv_cache is not None
        meta: PaddedStep = call.metadata
        slots = meta.batch.slot_mapping
        assert slots is not None
        stored = slots >= 0
        for half, new in zip(call.kv_cache, (call.k, call.v), strict=True):
            size = half.shape[1]
            half[slots[stored] // size, slots[stored] % size] = new[stored]

    def forward(self, call: AttentionCall) -> None:
        meta: PaddedStep = call.metadata
        if call.kv_cache is not None:
            k, v = (self.gather(half, meta) for half in call.kv_cache)
        else:
            assert call.k is not None and call.v is not None
            k = self.pad(call.k, meta)
            v = self.pad(call.v, meta)
        seen = self.seen(call.layer, meta)
        # Keys that no query of a row sees may be anything, also NaN, which a weight of 0 does not
        # hide.
        used = seen.any(dim=1)[..., None, None]
        k, v = (torch.where(used, x, 0).float() for x in (k, v))
        attended = attend(call.layer, self.pad(call.q, meta).float(), k, v, seen)
        call.out.copy_(attended[meta.row, meta.column])

    def pad(self, x: Tensor, meta: PaddedStep) -> Tensor:
        """x [T, heads, size] -> [R, Q, heads, size]."""
        padded = x.new_zeros(meta.batch.num_rows, meta.batch.max_query_len, *x.shape[1:])
        padded[meta.row, meta.column] = x
        return padded

    def gather(self, half: Tensor, meta: PaddedStep) -> Tensor:
        """half [blocks, block_size, heads, size] -> [R, K, heads, size], by the block tables."""
        assert meta.batch.block_table is not None
        size = half.shape[1]
        blocks = meta.batch.block_table[:, meta.keys // size].long()
        return half[blocks, meta.keys % size]

    def seen(self, layer: LayerParams, meta: PaddedStep) -> Tensor:
        """[R, Q, K]: whether a query of a row sees a key of it. Padding sees none."""
        ends = meta.batch.seq_lens_device.long()[:, None]
        columns = torch.arange(meta.batch.max_query_len, device=ends.device)[None]
        is_decoder = layer.attention_type is AttentionType.DECODER
        positions = columns + ends - meta.lengths if is_decoder else columns
        ahead = meta.keys - positions[..., None]
        seen = (meta.keys < ends)[:, None] & (columns < meta.lengths)[..., None]
        if is_decoder:
            seen = seen & (ahead <= 0)
        return seen if layer.window is None else seen & (ahead.abs() < layer.window)


def attend(layer: LayerParams, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q [R, Q, heads, size], k and v [R, K, KV heads, size], seen [R, Q, K] -> as q."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("rqhd,rkhd->rhqk", q, k) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    hidden = ~seen[:, None]
    # A query that sees nothing gives nothing.
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).masked_fill(hidden, 0)
    return torch.einsum("rhqk,rkhd->rqhd", weights, v)
