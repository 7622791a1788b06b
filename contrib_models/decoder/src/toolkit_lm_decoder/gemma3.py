"""Gemma 3 (text): Gemma 2 that norms queries and keys instead of capping scores, and rotates windowed layers at a pace of their own."""

from __future__ import annotations

from toolkit_lm.attention import Attention
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, Rotation
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding
from torch import Tensor

from toolkit_lm_decoder.gemma2 import Gemma2Attention, Gemma2ForCausalLM, Gemma2Model, GemmaRMSNorm
from toolkit_lm_decoder.llama import LlamaParts, head_size_of
from toolkit_lm_decoder.qwen3 import Qwen3Attention


class Gemma3Attention(Gemma2Attention, Qwen3Attention):
    norm = GemmaRMSNorm

    def soft_cap(self, config: HFConfig) -> None:
        return None

    def is_windowed(self, config: HFConfig, layer: int) -> bool:
        return (layer + 1) % config.get("sliding_window_pattern", int, 6) != 0


class Gemma3Model(Gemma2Model):
    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        self.local_rotary = self._rotary_of(HFConfig(vllm_config.hf_config), "sliding_attention")
        attentions = (layer.get_submodule("self_attn.attn") for layer in self.layers.owned)
        self.is_local = [isinstance(attention, Attention) and attention.params.window is not None for attention in attentions]

    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        return self._rotary_of(config, "full_attention")

    def _rotary_of(self, config: HFConfig, kind: str) -> RotaryEmbedding:
        nothing: dict[str, float] = {}
        # How checkpoints stated it before transformers 5. Only the layers that see everything were scaled.
        older = {
            "full_attention": {"rope_theta": config.get("rope_theta", float, 1e6), **config.get("rope_scaling", dict, nothing)},
            "sliding_attention": {"rope_theta": config.get("rope_local_base_freq", float, 1e4)},
        }
        config = HFConfig({**config.values, "rope_parameters": config.get("rope_parameters", dict) or older})
        return RotaryEmbedding(RopeParameters.read(config, head_size_of(config), layer_type=kind), vllm_config=self.vllm_config)

    def rotations(self, positions: Tensor) -> list[Rotation]:
        everywhere, nearby = self.rotary(positions), self.local_rotary(positions)
        return [nearby if is_local else everywhere for is_local in self.is_local]


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    attention = Gemma3Attention
    decoder = Gemma3Model
