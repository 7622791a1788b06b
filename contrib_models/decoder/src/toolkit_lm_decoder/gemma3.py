"""Gemma 3 (text): Gemma 2 that norms queries and keys instead of capping scores, and rotates
windowed layers at a pace of their own. EmbeddingGemma is the same, in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit_lm.attention import AttentionType
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.model import HFConfig, Rotation
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor

from toolkit_lm_decoder.gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2Model,
    GemmaMLP,
    GemmaRMSNorm,
    is_bidirectional,
)
from toolkit_lm_decoder.llama import LlamaModel, LlamaParts, head_size_of, layer_window
from toolkit_lm_decoder.qwen3 import Qwen3Attention


class Gemma3Attention(Gemma2Attention, Qwen3Attention):
    norm = GemmaRMSNorm

    def soft_cap(self, config: HFConfig) -> None:
        return None

    def is_windowed(self, config: HFConfig, layer: int) -> bool:
        return (layer + 1) % config.get("sliding_window_pattern", int, 6) != 0


class Gemma3EncoderAttention(Gemma3Attention):
    """Tokens see those after them too. `sliding_window` counts the tokens of both sides."""

    attention_type = AttentionType.ENCODER

    def window(self, config: HFConfig, layer: int) -> int | None:
        found = layer_window(config, layer, otherwise=self.is_windowed(config, layer))
        return None if found is None else found // 2 + 1


def rope_parameters(config: HFConfig, kind: str) -> RopeParameters:
    """Rope parameters of the layers of one kind. `rope_scaling` applies to full-attention layers:
    it overrides their stated parameters."""
    nothing: dict[str, Any] = {}
    rope = config.get("rope_parameters", dict, nothing).get(kind)
    # How checkpoints stated it before transformers 5.
    key, default = (
        ("rope_theta", 1e6) if kind == "full_attention" else ("rope_local_base_freq", 1e4)
    )
    values = {
        "rope_theta": config.get(key, float, default),
        **(rope if isinstance(rope, Mapping) else nothing),
    }
    if kind == "full_attention":
        values |= config.get("rope_scaling", dict, nothing)
    return RopeParameters.read(
        HFConfig({**config.values, "rope_parameters": values, "rope_scaling": None}),
        head_size_of(config),
    )


class Gemma3Model(Gemma2Model):
    def __init__(
        self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = ""
    ) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        self.local_rotary = self._rotary_of(HFConfig(vllm_config.hf_config), "sliding_attention")
        owned: tuple[Any, ...] = self.layers.owned
        self.is_local = [layer.self_attn.attn.params.window is not None for layer in owned]

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return self._rotary_of(config, "full_attention")

    def _rotary_of(self, config: HFConfig, kind: str) -> RotaryEmbedding:
        return RotaryEmbedding(rope_parameters(config, kind), vllm_config=self.vllm_config)

    def rotations(self, positions: Tensor) -> list[Rotation]:
        everywhere = self.rotary(positions)
        nearby = self.local_rotary(positions)
        return [nearby if is_local else everywhere for is_local in self.is_local]


class Gemma3EncoderParts(LlamaParts):
    """EmbeddingGemma (Vera et al. 2025)."""

    attention = Gemma3EncoderAttention
    feed_forward = GemmaMLP
    norm = GemmaRMSNorm
    layer = Gemma2DecoderLayer


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    attention = Gemma3Attention
    decoder = Gemma3Model

    def make_decoder(self, prefix: str) -> LlamaModel:
        """Raises UnsupportedError for an encoder that is to generate."""
        if not is_bidirectional(HFConfig(self.vllm_config.hf_config)):
            return super().make_decoder(prefix)
        if self.vllm_config.model.runner == "generate":
            raise UnsupportedError(
                "config.json: 'use_bidirectional_attention' makes this model an encoder. It "
                "embeds with runner='pooling', and cannot generate."
            )
        return self.decoder(Gemma3EncoderParts, vllm_config=self.vllm_config, prefix=prefix)
