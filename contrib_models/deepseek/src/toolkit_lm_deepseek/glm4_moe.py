"""GLM-4.5, 4.6 and 4.7: grouped-query attention, and DeepSeek-V3's routing."""

from __future__ import annotations

from toolkit_lm.config import VllmConfig
from toolkit_lm.model import HFConfig, RMSNorm
from toolkit_lm_decoder.llama import (
    LlamaAttention,
    LlamaForCausalLM,
    LlamaModel,
    eps_of,
    head_size_of,
)
from toolkit_lm_rotary import RopeParameters, RotaryEmbedding

from toolkit_lm_deepseek.deepseek_v3 import DeepseekV3ForCausalLM


class Glm4MoeAttention(LlamaAttention):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.get("use_qk_norm", bool, False):
            eps = eps_of(config)
            self.q_norm = RMSNorm(self.head_size, eps=eps, vllm_config=vllm_config)
            self.k_norm = RMSNorm(self.head_size, eps=eps, vllm_config=vllm_config)

    def has_output_bias(self, config: HFConfig) -> bool:
        return False

    def head_norms(self) -> tuple[RMSNorm, RMSNorm] | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm


class Glm4MoeModel(LlamaModel):
    def _rotary(self, config: HFConfig) -> RotaryEmbedding:
        values = HFConfig({"partial_rotary_factor": 0.5, **config.values})
        rope = RopeParameters.read(values, head_size_of(config))
        return RotaryEmbedding(rope, vllm_config=self.vllm_config)


class Glm4MoeForCausalLM(DeepseekV3ForCausalLM):
    packed = LlamaForCausalLM.packed
    attention = Glm4MoeAttention
    decoder = Glm4MoeModel
    num_dense = 1
