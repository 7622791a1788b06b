"""GLM-4-9B as transformers reads it: neighbouring dimensions of half of each head are rotated, and
gates and inputs are one tensor."""

from __future__ import annotations

from toolkit_lm.model import HFConfig
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding

from toolkit_lm_decoder.llama import LlamaAttention, LlamaForCausalLM, LlamaModel, head_size_of


class GlmAttention(LlamaAttention):
    def has_output_bias(self, config: HFConfig) -> bool:
        return False


class GlmModel(LlamaModel):
    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        values = HFConfig({"partial_rotary_factor": 0.5, **config.values})
        rope = RopeParameters.read(values, head_size_of(config))
        return RotaryEmbedding(rope, interleaved=True, vllm_config=self.vllm_config)


class GlmForCausalLM(LlamaForCausalLM):
    packed = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    attention = GlmAttention
    decoder = GlmModel
