"""DeepSeek-V3 and R1, and Kimi K2, which is of the same class."""

from __future__ import annotations

from typing import ClassVar

from toolkit_lm.model import HFConfig
from toolkit_lm_decoder.llama import LlamaModel

from toolkit_lm_deepseek.attention import DeepseekModel
from toolkit_lm_deepseek.experts import DeepseekForCausalLM, SigmoidMoE


class DeepseekV3Model(DeepseekModel):
    def interleaves(self, config: HFConfig) -> bool:
        return config.get("rope_interleave", bool, True)


class DeepseekV3ForCausalLM(DeepseekForCausalLM):
    decoder: ClassVar[type[LlamaModel]] = DeepseekV3Model
    moe = SigmoidMoE
    num_dense: ClassVar[int] = 3
    """Default of `first_k_dense_replace`."""

    @classmethod
    def is_dense(cls, config: HFConfig, layer: int) -> bool:
        return layer < config.get("first_k_dense_replace", int, cls.num_dense)
