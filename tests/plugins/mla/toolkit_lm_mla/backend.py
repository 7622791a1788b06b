"""LatentBackend: attention to latent vectors, in plain torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from toolkit_lm.attention import AttentionBackend, AttentionCall, AttentionSpec, BatchView
from toolkit_lm.kv import KVCacheSpec, PageTensor
from torch import Tensor

from toolkit_lm_mla.spec import BYTES, LatentSpec


class Row(NamedTuple):
    """A sequence in a step."""

    tokens: slice
    length: int
    """Tokens that are visible to its last one."""
    blocks: Tensor


class Step(NamedTuple):
    """A step's rows, and where its tokens are stored."""

    rows: list[Row]
    slots: Tensor


class LatentBackend(AttentionBackend):
    """All query heads share the one vector of a token, which is its key and its value. A page holds
    [block_size, size]."""

    @classmethod
    def refuses(cls, spec: AttentionSpec) -> str | None:
        if not isinstance(spec.kv_cache, LatentSpec):
            return "only for layers that keep latent vectors"
        if spec.dtype not in BYTES or spec.kv_cache.dtype != spec.dtype:
            return f"no product of {spec.dtype} and latent vectors in {spec.kv_cache.dtype}"
        asked = [
            name
            for name in ("window", "soft_cap", "sinks", "bias", "spans")
            if getattr(spec, name) not in (None, False)
        ]
        return f"latent vectors are read without {', '.join(asked)}" if asked else None

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> list[PageTensor]:
        assert isinstance(spec, LatentSpec)
        return [PageTensor((spec.block_size, spec.size), spec.dtype)]

    def build(self, batch: BatchView) -> Step:
        assert batch.block_table is not None and batch.slot_mapping is not None
        assert self.setup.kv_cache is not None
        size = self.setup.kv_cache.block_size
        starts = batch.query_start.tolist()
        rows = [
            Row(slice(start, end), length, table[: -(-length // size)])
            for start, end, length, table in zip(
                starts, starts[1:], batch.seq_lens.tolist(), batch.block_table, strict=False
            )
            if length
        ]
        return Step(rows, batch.slot_mapping)

    def write_kv(self, call: AttentionCall) -> None:
        assert call.k is not None and call.kv_cache is not None
        [cache] = call.kv_cache
        slots = call.metadata.slots
        stored = slots >= 0
        cache.view(-1, cache.shape[-1])[slots[stored]] = call.k[stored, 0]

    def forward(self, call: AttentionCall) -> None:
        assert call.kv_cache is not None
        [cache] = call.kv_cache
        call.out.zero_()
        for tokens, length, blocks in call.metadata.rows:
            latents = cache[blocks].flatten(0, 1)[:length]
            q = call.q[tokens].transpose(0, 1)
            scores = (q @ latents.T).float() * call.layer.scale
            places = torch.arange(length, device=q.device)
            later = places > places[length - q.shape[1] :, None]
            weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(q.dtype)
            call.out[tokens] = (weights @ latents).transpose(0, 1)
