"""Quantized caches: keys and values in int8 or fp8, with a scale per token and head, or the
checkpoint's scales of the layer."""

from __future__ import annotations

import dataclasses

import torch
from msgspec.structs import replace
from toolkit_lm.attention import AttentionCall, BatchView
from toolkit_lm_paged_attention import PagedStep
from torch import Tensor

CACHES = (("int8", "token"), ("float8_e4m3fn", "token"), ("float8_e4m3fn", "layer"))
"""Dtype and `scales` of the caches that are read."""
_GREATEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Greatest stored number of each dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizedStep(PagedStep):
    """One step. The block table of its batch has indices into `blocks`."""

    blocks: Tensor
    """[N] int64: ids of the blocks that the step reads."""


def build(batch: BatchView) -> QuantizedStep:
    """Metadata of a step. Its plan has indices into the blocks that the step reads: `forward` gives
    them as floats."""
    assert batch.block_table is not None
    blocks, table = torch.unique(batch.block_table, return_inverse=True)
    read = dataclasses.replace(batch, block_table=table.to(batch.block_table.dtype))
    return QuantizedStep(read, None, blocks.long())


def write_kv(call: AttentionCall) -> None:
    """Stores the step's keys and values."""
    assert call.k is not None and call.v is not None and call.kv_cache is not None
    step: QuantizedStep = call.metadata
    assert step.batch.slot_mapping is not None
    slots = step.batch.slot_mapping
    stored = slots.ge(0).nonzero()[:, 0]
    cache = call.kv_cache[0]
    size = cache.shape[2]
    at = slots[stored]
    block = at.div(size, rounding_mode="floor")
    offset = at % size
    # index_put has no kernel for 8-bit floats: they are copied as bytes.
    as_bytes = cache.view(torch.uint8)
    layer_scales = call.layer.k_scale, call.layer.v_scale
    for half, x in enumerate((call.k, call.v)):
        codes, scales = _quantize(x[stored], cache.dtype, layer_scales[half])
        as_bytes[block, half, offset] = codes.view(torch.uint8)
        if len(call.kv_cache) > 1:
            call.kv_cache[1][block, half, offset] = scales


def dequantized(call: AttentionCall) -> AttentionCall:
    """The call with floats in place of the cache, and of the step's own keys and values: these are
    seen as they are stored, so that chunks of a prompt change nothing."""
    assert call.kv_cache is not None
    step: QuantizedStep = call.metadata
    codes = call.kv_cache[0][step.blocks].float()
    scales = (call.layer.k_scale, call.layer.v_scale)
    if len(call.kv_cache) > 1:
        codes *= call.kv_cache[1][step.blocks].unsqueeze(-1)
    else:
        assert scales[0] is not None and scales[1] is not None
        codes *= torch.stack([scales[0], scales[1]]).view(2, 1, 1, 1)
    kept = {"kv_cache": (codes.to(call.q.dtype),)}
    if call.k is None or call.v is None:
        return replace(call, **kept)
    dtype = call.kv_cache[0].dtype
    k, v = (_round_trip(x, dtype, scale) for x, scale in zip((call.k, call.v), scales, strict=True))
    return replace(call, k=k, v=v, **kept)


def _quantize(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """[T, heads, head_size] -> what is stored of it, and the scales, which broadcast to [T, heads]
    float32. `scale`: the layer's; None: one for each token and head."""
    x = x.float()
    greatest = _GREATEST[dtype]
    if scale is None:
        largest = x.abs().amax(-1)
        # CUDA divides by a number of the host as it multiplies by its reciprocal, which is not
        # rounded to the same scale. The divisor is filled in on the device.
        scale = torch.where(largest == 0, 1.0, largest / largest.new_full((), greatest))
    scaled = (x / scale.unsqueeze(-1)).clamp(-greatest, greatest)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def _round_trip(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    codes, scales = _quantize(x, dtype, scale)
    return (codes.float() * scales.unsqueeze(-1)).to(x.dtype)
