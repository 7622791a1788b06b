"""LatentAttention: attention over one latent vector per token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from toolkit_lm.attention import Attention, AttentionCall, AttentionSpec, LayerParams, current
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import choose_kernels
from toolkit_lm_hybrid.blocks import HeadProduct
from torch import Tensor, device

from toolkit_lm_deepseek.backend import LatentBackend
from toolkit_lm_deepseek.params import Choice, IndexShape, LatentParams
from toolkit_lm_deepseek.spec import LatentSpec


class LatentAttention(Attention):
    """Multi-head latent attention (DeepSeek-AI 2024) without its projections: q [T, num_heads *
    head_size] and what is cached of each token [T, rank + rotated_size] -> [T, num_heads *
    value_size]. With an indexer, its key is cached too, and v is what it looks for (see
    LatentParams)."""

    backend = LatentBackend
    params: LatentParams
    needs_cache = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        *,
        rank: int,
        rotated_size: int,
        value_size: int,
        scale: float,
        weights: Callable[[], tuple[HeadProduct, HeadProduct]],
        expand: Callable[[Tensor], Tensor],
        index: IndexShape | None = None,
        choice: Choice | None = None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        """The arguments are those of LatentParams."""
        super().__init__(
            num_heads,
            head_size,
            num_kv_heads=1,
            scale=scale,
            vllm_config=vllm_config,
            prefix=prefix,
        )
        common = {field.name: getattr(self.params, field.name) for field in fields(LayerParams)}
        self.params = LatentParams(
            **common,
            rank=rank,
            rotated_size=rotated_size,
            value_size=value_size,
            weights=weights,
            expand=expand,
            kernels=choose_kernels(),
            index=index,
            choice=choice,
        )

    def kv_cache_spec(self) -> LatentSpec:
        index = self.params.index
        size = self.params.width + (0 if index is None else index.size)
        return LatentSpec(block_size=self.block_size, size=size, dtype=self.dtype)

    def attention_spec(self, device: device, *, cached: bool) -> AttentionSpec:
        # Backends that keep keys and values shall refuse it by the cache's kind.
        return super().attention_spec(device, cached=True)

    def forward(self, q: Tensor, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        assert k is not None and (v is None) == (self.params.index is None)
        params = self.params
        q = q.view(-1, params.num_heads, params.head_size)
        out = q.new_empty(len(q), params.num_heads, params.value_size)
        inputs = (q, k.unsqueeze(1)) if v is None else (q, k.unsqueeze(1), v)
        return self.run(*inputs, out=out).flatten(1)

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        q, kept, *sought = inputs
        binding, metadata = current(self.prefix)
        backend: Any = binding.backend
        call = AttentionCall(
            binding.params, q, kept, sought[0] if sought else kept, binding.kv_cache, metadata, out
        )
        if binding.stores:
            backend.write_kv(call)
        backend.forward(call)
