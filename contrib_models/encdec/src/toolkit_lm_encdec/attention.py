"""The attention of encoder-decoder models: within a sequence, and of a decoder over what the
encoder made of another one."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit_lm.attention import Attention, AttentionBias, AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    Shard,
    join,
    see_encoder_tokens,
)
from torch import Tensor, nn

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "kv_proj": ("k_proj", "v_proj")}
"""Projections that are separate in checkpoints and one product here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Sizes of attention. Counts are totals over all ranks."""

    hidden_size: int
    num_heads: int
    head_size: int
    scale: float
    has_biases: bool
    # Used by cross attention only.
    soft_cap: float | None = None
    num_kv_heads: int | None = None
    """Heads of keys and values; None: as many as query heads."""
    encoder_size: int | None = None
    """Size of the encoder's states; None: the decoder's size."""

    @property
    def size(self) -> int:
        """Total size of all queries."""
        return self.num_heads * self.head_size


class SelfAttention(nn.Module):
    """Multi-head attention within a sequence: x [T, H], residual [T, H] -> attention of x, plus the
    residual [T, H]."""

    def __init__(
        self,
        heads: Heads,
        *,
        type: AttentionType,
        bias: AttentionBias | None = None,
        vllm_config: VllmConfig,
        prefix: str,
    ) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            heads.hidden_size,
            heads.head_size,
            heads.num_heads,
            heads.num_heads,
            bias=heads.has_biases,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        self.out_proj = out_projection(heads, vllm_config, prefix)
        self.attn = Attention(
            self.qkv_proj.num_heads,
            heads.head_size,
            type=type,
            scale=heads.scale,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        out: Tensor = self.out_proj(self.attn(*self.qkv_proj(x).chunk(3, dim=-1)), residual)
        return out


class CrossAttention(nn.Module):
    """Attention over encoder states: x [T, H], residual [T, H] -> attention of x, plus the residual
    if there is one [T, H].

    `encoder_hidden_states` [E, H] are those whose keys and values this step stores; None: those of
    all sequences are cached.
    """

    def __init__(self, heads: Heads, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        size = heads.hidden_size
        bias = heads.has_biases
        # The self-attention of the same layer has checked that ranks share the heads evenly, but
        # not that they share no KV head.
        kv_heads = Shard.even(
            heads.num_kv_heads or heads.num_heads, vllm_config.parallel, f"KV heads of {prefix}"
        )
        kv_size = kv_heads.full * heads.head_size
        self.q_proj = ColumnParallelLinear(
            size, heads.size, bias=bias, vllm_config=vllm_config, prefix=join(prefix, "q_proj")
        )
        self.kv_proj = MergedColumnParallelLinear(
            heads.encoder_size or size,
            [kv_size, kv_size],
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "kv_proj"),
        )
        see_encoder_tokens(self.kv_proj)
        self.out_proj = out_projection(heads, vllm_config, prefix)
        self.attn = Attention(
            self.q_proj.output_size // heads.head_size,
            heads.head_size,
            num_kv_heads=kv_heads.size,
            type=AttentionType.CROSS,
            scale=heads.scale,
            soft_cap=heads.soft_cap,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, encoder_hidden_states: Tensor | None
    ) -> Tensor:
        kv = (
            ()
            if encoder_hidden_states is None
            else self.kv_proj(encoder_hidden_states).chunk(2, dim=-1)
        )
        out: Tensor = self.out_proj(self.attn(self.q_proj(x), *kv), residual)
        return out


def out_projection(heads: Heads, vllm_config: VllmConfig, prefix: str) -> RowParallelLinear:
    """The last projection of an attention."""
    return RowParallelLinear(
        heads.size,
        heads.hidden_size,
        bias=heads.has_biases,
        vllm_config=vllm_config,
        prefix=join(prefix, "out_proj"),
    )
