"""The Attention layer that models use. It declares what it needs; the runner binds a backend and a cache to it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from toolkit_lm.attention.backend import AttentionBias, LayerParams
from toolkit_lm.attention.context import current
from toolkit_lm.attention.spec import AttentionSpec, AttentionType, KVCacheSpec
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import CheckpointError


class Attention(nn.Module):
    """Attention over the flat batch: q [T, num_heads * head_size], k and v [T, num_kv_heads * head_size] -> as q.

    Head counts are this rank's. `scale` multiplies q·k. `bias` and `sinks` [num_heads] are the model's own modules or parameters.
    `prefix` is the layer's name in the checkpoint, and its key in the engine.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        vllm_config: VllmConfig,
        prefix: str,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        type: AttentionType = AttentionType.DECODER,
        window: int | None = None,
        soft_cap: float | None = None,
        bias: AttentionBias | None = None,
        sinks: Tensor | None = None,
        spans: bool = False,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads if num_kv_heads is not None else num_heads
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise CheckpointError(f"layer {prefix!r}: {num_heads} query heads cannot share {num_kv_heads} KV heads evenly.")
        self.params = LayerParams(
            name=prefix,
            attention_type=type,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            scale=scale if scale is not None else head_size**-0.5,
            window=window,
            soft_cap=soft_cap,
            bias=bias,
            sinks=sinks,
            spans=spans,
        )
        # Weights are found among a module's own attributes only.
        if isinstance(bias, nn.Module):
            self.bias = bias
        if isinstance(sinks, nn.Parameter):
            self.sinks = sinks
        self.prefix = prefix
        self.dtype = vllm_config.model.dtype
        self.block_size = vllm_config.cache.block_size

    def spec(self, device: torch.device) -> AttentionSpec:
        """What this layer asks of a backend on `device`."""
        return AttentionSpec(
            layer=self.prefix,
            type=self.params.attention_type,
            num_heads=self.params.num_heads,
            num_kv_heads=self.params.num_kv_heads,
            head_size=self.params.head_size,
            dtype=self.dtype,
            device=device.type,
            block_size=None if self.params.attention_type is AttentionType.ENCODER else self.block_size,
            window=self.params.window,
            soft_cap=self.params.soft_cap,
            sinks=self.params.sinks is not None,
            bias=self.params.bias is not None,
            spans=self.params.spans,
        )

    def kv_cache_spec(self) -> KVCacheSpec | None:
        """What this layer keeps per token; None when it keeps nothing."""
        if self.params.attention_type is AttentionType.ENCODER:
            return None
        kind = "cross" if self.params.attention_type is AttentionType.CROSS else "full" if self.params.window is None else "window"
        return KVCacheSpec(
            kind=kind,
            block_size=self.block_size,
            num_kv_heads=self.params.num_kv_heads,
            head_size=self.params.head_size,
            dtype=self.dtype,
            window=self.params.window,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        binding, metadata = current(self.prefix)
        q = q.view(-1, self.params.num_heads, self.params.head_size)
        k = k.view(-1, self.params.num_kv_heads, self.params.head_size)
        v = v.view(-1, self.params.num_kv_heads, self.params.head_size)
        out = torch.empty_like(q)
        if binding.kv_cache is not None:
            assert metadata.slot_mapping is not None, f"{self.prefix}: a cache, but no slot mapping"
            binding.backend.write_kv(self.params, k, v, binding.kv_cache, metadata.slot_mapping)
        binding.backend.forward(self.params, q, k, v, binding.kv_cache, metadata.meta, out)
        return out.view(-1, self.params.num_heads * self.params.head_size)
