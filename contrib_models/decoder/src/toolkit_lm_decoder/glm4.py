"""GLM-4-0414 and GLM-Z1: GLM with norms on both sides of attention and feed-forward."""

from __future__ import annotations

from toolkit_lm.model import LayerParts, RMSNorm, Rotation
from torch import Tensor

from toolkit_lm_decoder.glm import GlmForCausalLM
from toolkit_lm_decoder.llama import LlamaDecoderLayer


class Glm4DecoderLayer(LlamaDecoderLayer):
    seams = LlamaDecoderLayer.seams
    norms = (
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    )
    post_self_attn_layernorm: RMSNorm
    post_mlp_layernorm: RMSNorm

    def parts(self) -> LayerParts | None:
        return self.parts_of(
            input_norm=self.input_layernorm,
            post_norm=self.post_attention_layernorm,
            out_norms=(self.post_self_attn_layernorm, self.post_mlp_layernorm),
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.enter(x, residual)
        x = self.post_self_attn_layernorm(self.self_attn(x, rotation))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4ForCausalLM(GlmForCausalLM):
    layer = Glm4DecoderLayer
