"""SharedKVForCausalLM: two layers of attention, one KV cache."""

from __future__ import annotations

from typing import Any

from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    ColumnParallelLinear,
    HFConfig,
    Model,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from torch import Tensor, nn

HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 16


class SharedKVForCausalLM(Model):
    """x + attention(norm(x)), twice: the second time with keys and values of the first."""

    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        vocab_size = config.require("vocab_size", int)
        size = config.require("hidden_size", int)
        inner = HEADS * HEAD_SIZE
        self.embeddings = VocabParallelEmbedding(
            vocab_size, size, vllm_config=vllm_config, prefix="embeddings"
        )
        self.qkv_proj = QKVParallelLinear(
            size, HEAD_SIZE, HEADS, KV_HEADS, vllm_config=vllm_config, prefix="qkv_proj"
        )
        self.query = ColumnParallelLinear(size, inner, vllm_config=vllm_config, prefix="query")
        # Where config.json says so, the second layer names another: for tests of what is refused.
        shares_with = config.get("shares_with", str, "attn.0")
        window = config.get("second_window", int)
        self.attn = nn.ModuleList(
            Attention(
                self.qkv_proj.num_heads,
                HEAD_SIZE,
                num_kv_heads=self.qkv_proj.num_kv_heads,
                vllm_config=vllm_config,
                prefix=f"attn.{index}",
                window=window if index else None,
                shares_with=shares_with if index else None,
            )
            for index in range(2)
        )
        names = ("out.0", "out.1")
        self.out = nn.ModuleList(
            RowParallelLinear(inner, size, vllm_config=vllm_config, prefix=name) for name in names
        )
        self.norms = nn.ModuleList(
            RMSNorm(size, eps=1e-5, vllm_config=vllm_config) for _ in range(3)
        )
        self.lm_head = ParallelLMHead(vocab_size, size, vllm_config=vllm_config, prefix="lm_head")

    def forward(self, input_ids: Tensor, positions: Tensor, **inputs: Any) -> Tensor:
        x = self.embeddings(input_ids)
        sizes = [self.qkv_proj.q_size, self.qkv_proj.kv_size, self.qkv_proj.kv_size]
        q, k, v = self.qkv_proj(self.norms[0](x)).split(sizes, dim=-1)
        x = x + self.out[0](self.attn[0](q, k, v))
        x = x + self.out[1](self.attn[1](self.query(self.norms[1](x)), k, v))
        out: Tensor = self.norms[2](x)
        return out

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(hidden_states)
        return logits
