"""Attention with an output gate: Qwen3-Next and its kin."""

from __future__ import annotations

import torch
from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, QKVParallelLinear, Rotation, RowParallelLinear, join
from toolkit_lm_decoder.dense import dense
from toolkit_lm_decoder.gemma2 import GemmaRMSNorm
from toolkit_lm_decoder.llama import eps_of, head_size_of
from torch import Tensor, nn


class GatedAttention(nn.Module):
    """Grouped-query attention, times the sigmoid of a gate: x [T, H] -> [T, H]. The projection to
    queries gives each head its query, then its gate."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        hidden_size = config.require("hidden_size", int)
        num_heads = config.require("num_attention_heads", int)
        bias = config.get("attention_bias", bool, False)
        self.head_size = head_size_of(config)
        self.o_proj = RowParallelLinear(
            num_heads * self.head_size,
            hidden_size,
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "o_proj"),
        )
        self.qkv_proj = QKVParallelLinear(
            hidden_size,
            self.head_size,
            2 * num_heads,
            config.get("num_key_value_heads", int, num_heads),
            bias=bias,
            vllm_config=vllm_config,
            prefix=join(prefix, "qkv_proj"),
        )
        eps = eps_of(config)
        self.q_norm = GemmaRMSNorm(self.head_size, eps=eps, vllm_config=vllm_config)
        self.k_norm = GemmaRMSNorm(self.head_size, eps=eps, vllm_config=vllm_config)
        self.sizes = (self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size)
        self.attn = Attention(
            self.qkv_proj.num_heads // 2,
            self.head_size,
            num_kv_heads=self.qkv_proj.num_kv_heads,
            vllm_config=vllm_config,
            prefix=join(prefix, "attn"),
        )

    def forward(self, x: Tensor, rotation: Rotation) -> Tensor:
        queries, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, gate = queries.unflatten(-1, (-1, 2 * self.head_size)).chunk(2, dim=-1)
        q = rotation.rotate(self.q_norm(dense(q)))
        k = rotation.rotate(self.k_norm(dense(k.unflatten(-1, (-1, self.head_size)))))
        attended = self.attn(q, k, v)
        out: Tensor = self.o_proj(attended * torch.sigmoid(dense(gate)).view(attended.shape))
        return out
