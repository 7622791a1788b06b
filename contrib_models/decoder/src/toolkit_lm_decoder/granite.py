"""Granite: Llama with a factor for embeddings, scores, what each half of a layer adds, and
logits."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, LayerParts, Rotation
from torch import Tensor

from toolkit_lm_decoder.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaParts,
)


class GraniteAttention(LlamaAttention):
    def scale(self, config: HFConfig) -> float:
        return config.get("attention_multiplier", float, 1.0)


class GraniteDecoderLayer(LlamaDecoderLayer):
    seams = LlamaDecoderLayer.seams

    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        self.multiplier = HFConfig(vllm_config.hf_config).get("residual_multiplier", float, 1.0)

    def parts(self) -> LayerParts | None:
        return self.parts_of(
            input_norm=self.input_layernorm,
            post_norm=self.post_attention_layernorm,
            multiplier=self.multiplier,
        )

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.enter(x, residual)
        x = self.self_attn(x, rotation) * self.multiplier
        x, residual = self.post_attention_layernorm(x, residual)
        return self.mlp(x) * self.multiplier, residual


class GraniteModel(LlamaModel):
    def embedding_scale(self, config: HFConfig) -> float:
        return config.get("embedding_multiplier", float, 1.0)


class GraniteForCausalLM(LlamaForCausalLM):
    attention = GraniteAttention
    layer = GraniteDecoderLayer
    decoder = GraniteModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.divisor = HFConfig(vllm_config.hf_config).get("logits_scaling", float, 1.0)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states) / self.divisor
