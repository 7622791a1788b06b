"""An attention backend that a CUDA graph can hold: what it launches follows from the view's shapes,
and nothing waits. It is slow."""

from __future__ import annotations

import torch
from toolkit_lm.attention import GraphSupport
from toolkit_lm.plugin import hookimpl
from toolkit_lm_sdpa.backend import SdpaBackend


class StaticBackend(SdpaBackend):
    @classmethod
    def graphs(cls, spec):
        return GraphSupport.ALWAYS

    seen = []
    """The batch view of each step so far."""

    def build(self, batch):
        type(self).seen.append(batch)
        return batch

    def write_kv(self, call):
        pages = call.kv_cache[0]
        for half, new in enumerate((call.k, call.v)):
            slots = torch.arange(pages.shape[0] * pages.shape[2], device=call.k.device)
            hit = slots[:, None] == call.metadata.slot_mapping[None, :]
            stored = (hit.to(new.dtype) @ new.flatten(1)).view(pages[:, half].shape)
            pages[:, half] = torch.where(
                hit.any(1).view(pages.shape[0], pages.shape[2], 1, 1), stored, pages[:, half]
            )

    def forward(self, call):
        layer = call.layer
        q = call.q
        meta = call.metadata
        pages = call.kv_cache[0]
        device = q.device
        ends = meta.query_start_device[1:]
        tokens = torch.arange(len(q), device=device)
        row = torch.searchsorted(ends, tokens, right=True).clamp_(max=len(ends) - 1)
        position = meta.seq_lens_device[row] - ends[row] + tokens
        keys, values = (
            pages[:, half][meta.block_table[row].long()].flatten(1, 2) for half in (0, 1)
        )
        group = layer.num_heads // layer.num_kv_heads
        keys, values = (one.repeat_interleave(group, 2) for one in (keys, values))
        scores = torch.einsum("thd,tlhd->thl", q, keys) * layer.scale
        visible = (torch.arange(keys.shape[1], device=device)[None, :] <= position[:, None])[
            :, None
        ]
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1).nan_to_num()
        call.out.copy_(torch.einsum("thl,tlhd->thd", weights, values))


class DecodeBackend(StaticBackend):
    @classmethod
    def graphs(cls, spec):
        return GraphSupport.DECODE


class UniformBackend(StaticBackend):
    @classmethod
    def graphs(cls, spec):
        return GraphSupport.UNIFORM


class StaticBackends:
    @hookimpl
    def toolkit_register_attention_backends(self, backends):
        for name in ("StaticBackend", "DecodeBackend", "UniformBackend"):
            backends.add(
                name.removesuffix("Backend").lower(), f"static_backend:{name}", priority=-1
            )
