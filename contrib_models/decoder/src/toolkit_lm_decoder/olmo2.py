"""OLMo 2: Llama that norms what attention and feed-forward give rather than take, and queries and keys over all heads."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, RMSNorm, Rotation
from torch import Tensor

from toolkit_lm_decoder.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, eps_of
from toolkit_lm_decoder.sharded_norm import ShardedRMSNorm


class Olmo2Attention(LlamaAttention):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        eps = eps_of(HFConfig(vllm_config.hf_config))
        q, k, _ = self.qkv_proj.spec.outputs
        self.q_norm = ShardedRMSNorm(q, eps=eps, vllm_config=vllm_config)
        self.k_norm = ShardedRMSNorm(k, eps=eps, vllm_config=vllm_config)

    def project(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k = (part.unflatten(-1, (-1, self.head_size)) for part in (self.q_norm(q), self.k_norm(k)))
        return rotation.rotate(q), rotation.rotate(k), v


class Olmo2DecoderLayer(LlamaDecoderLayer):
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    post_feedforward_layernorm: RMSNorm

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo2ForCausalLM(LlamaForCausalLM):
    attention = Olmo2Attention
    layer = Olmo2DecoderLayer
