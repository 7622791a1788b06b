"""MiniCPM3: latent attention in a dense model, with a factor for embeddings, what each half of a
layer adds, and what the head gets."""

from __future__ import annotations

import math

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig
from toolkit_lm_decoder.granite import GraniteDecoderLayer
from toolkit_lm_decoder.llama import LlamaForCausalLM, LlamaParts
from torch import Tensor

from toolkit_lm_deepseek.attention import DeepseekAttention, DeepseekModel


def _stated(config: HFConfig, key: str, missing: float, null: float) -> float:
    """A number of config.json. It has a value where the key is missing, and another where it is
    null."""
    return config.get(key, float, null) if key in config.values else missing


class MiniCPM3Attention(DeepseekAttention):
    def value_size_of(self, config: HFConfig) -> int:
        heads = config.require("num_attention_heads", int)
        return config.get("v_head_dim", int, config.require("hidden_size", int) // heads)


class MiniCPM3DecoderLayer(GraniteDecoderLayer):
    def __init__(self, parts: type[LlamaParts], *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(parts, vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        root = math.sqrt(config.require("num_hidden_layers", int))
        self.multiplier = _stated(config, "scale_depth", 1.4, root) / root


class MiniCPM3Model(DeepseekModel):
    is_tied_by_default = True

    def interleaves(self, config: HFConfig) -> bool:
        return False

    def embedding_scale(self, config: HFConfig) -> float:
        return config.get("scale_emb", float, 12.0)


class MiniCPM3ForCausalLM(LlamaForCausalLM):
    packed = {"gate_up_proj": ("gate_proj", "up_proj")}
    attention = MiniCPM3Attention
    layer = MiniCPM3DecoderLayer
    decoder = MiniCPM3Model

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        self.divisor = size / _stated(config, "dim_model_base", 256, size)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        return super().compute_logits(hidden_states / self.divisor)
