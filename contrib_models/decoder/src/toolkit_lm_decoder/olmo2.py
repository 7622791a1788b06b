"""OLMo 2: Llama that norms what attention and feed-forward give rather than take, and queries and
keys over all heads."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, LayerParts, RMSNorm, Rotation
from torch import Tensor

from toolkit_lm_decoder.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, eps_of
from toolkit_lm_decoder.sharded_norm import norm_of_shard


class Olmo2Attention(LlamaAttention):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        eps = eps_of(HFConfig(vllm_config.hf_config))
        q, k, _ = self.qkv_proj.spec.outputs
        self.q_norm = norm_of_shard(q, eps=eps, vllm_config=vllm_config)
        self.k_norm = norm_of_shard(k, eps=eps, vllm_config=vllm_config)

    def head_norms(self) -> tuple[RMSNorm, RMSNorm]:
        return self.q_norm, self.k_norm


class Olmo2DecoderLayer(LlamaDecoderLayer):
    seams = LlamaDecoderLayer.seams
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    post_feedforward_layernorm: RMSNorm

    def parts(self) -> LayerParts | None:
        norms = (self.post_attention_layernorm, self.post_feedforward_layernorm)
        return self.parts_of(input_norm=None, post_norm=None, out_norms=norms)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo2ForCausalLM(LlamaForCausalLM):
    attention = Olmo2Attention
    layer = Olmo2DecoderLayer
